"""Latencies of an idle OpenAI-compatible server as a client sees them: ours, or any other.

Prompts are token ids and `ignore_eos` is set, so that every server does the same work. TTFT is
the time to the first chunk of a stream; TPOT is (last - first chunk) / (tokens - 1).
"""

import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import msgspec

PROMPT_TOKENS = (512, 2000)
STREAMS = (1, 8)
OUTPUT_TOKENS = 64
REPEATS = 5


class Idle(msgspec.Struct, frozen=True):
    """Medians, in milliseconds, in the order of PROMPT_TOKENS and STREAMS."""

    ttft_ms: tuple[float, ...]
    tpot_ms: tuple[float, ...]

    @property
    def named(self) -> dict[str, float]:
        ttft = {
            f"TTFT, {n}-token prompt": ms for n, ms in zip(PROMPT_TOKENS, self.ttft_ms, strict=True)
        }
        tpot = {
            f"TPOT, {n} short stream(s)": ms for n, ms in zip(STREAMS, self.tpot_ms, strict=True)
        }
        return ttft | tpot


def measure(url: str) -> Idle:
    """`url` is the server's root; nobody else may use it meanwhile."""
    model = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
    return Idle(
        tuple(
            statistics.median(_ttft_ms(url, model, n) for _ in range(REPEATS))
            for n in PROMPT_TOKENS
        ),
        tuple(statistics.median(tpot_ms(url, model, n) for _ in range(REPEATS)) for n in STREAMS),
    )


def tpot_ms(url: str, model: str, streams: int) -> float:
    """The median over so many short streams that start together."""
    gate = threading.Barrier(streams)

    def one(number: int) -> float:
        gate.wait()
        first_s, last_s, _ = _stream(url, model, _prompt(32, number), OUTPUT_TOKENS)
        return 1000 * (last_s - first_s) / (OUTPUT_TOKENS - 1)

    with ThreadPoolExecutor(streams) as pool:
        return statistics.median(pool.map(one, range(streams)))


_counter = iter(range(1 << 30))


def _ttft_ms(url: str, model: str, tokens: int) -> float:
    first_s, _, started_s = _stream(url, model, _prompt(tokens, next(_counter)), 1)
    return 1000 * (first_s - started_s)


def _prompt(tokens: int, number: int) -> list[int]:
    """Prompts that differ from the first token on, so that no prefix cache helps."""
    return [100 + (number * 7919 + i * 31) % 20_000 for i in range(tokens)]


def _stream(url: str, model: str, prompt: list[int], tokens: int) -> tuple[float, float, float]:
    """(first chunk, last chunk, sent) on the performance counter."""
    body = {"model": model, "prompt": prompt, "max_tokens": tokens, "stream": True,
            "temperature": 0, "ignore_eos": True}  # fmt: skip
    started_s = time.perf_counter()
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=300) as response:
        response.raise_for_status()
        lines = (line for line in response.iter_lines() if line.startswith("data: {"))
        chunks = [time.perf_counter() for _ in lines]
    return chunks[0], chunks[-1], started_s
