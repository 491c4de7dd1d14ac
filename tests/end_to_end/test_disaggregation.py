"""Prefill and decode are two processes, and the cache in between is what the text is made from."""

import mmap
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import psutil

from tests.end_to_end.service import Service, eventually, serving

PROMPT = "The cache is pulled from one process by another. " * 2


@contextmanager
def stopped(process: psutil.Process) -> Iterator[None]:
    """SIGSTOP for a while."""
    process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        process.send_signal(signal.SIGCONT)


@contextmanager
def pool_of(process: psutil.Process) -> Iterator[mmap.mmap]:
    """A worker's own KV pool, by its descriptor in /proc."""
    descriptors = Path(f"/proc/{process.pid}/fd")
    own = next(fd for fd in descriptors.iterdir() if "distserved-prefill-0" in os.readlink(fd))
    with open(own, "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        yield memory


def text_of(answer: dict[str, object]) -> str:
    return str(answer["choices"][0]["text"])  # type: ignore[index]


def test_one_flipped_byte_of_a_held_block_changes_the_text(tiny_service: Service) -> None:
    service = tiny_service
    undisturbed = text_of(service.complete(PROMPT))
    assert text_of(service.complete(PROMPT)) == undisturbed
    workers = service.workers()
    with ThreadPoolExecutor() as pool:
        with stopped(workers["decode-0"]):
            answer = pool.submit(service.complete, PROMPT)
            eventually(lambda: service.counts()["prefill-0"]["held"] > 0, 10, "blocks held")
            with pool_of(workers["prefill-0"]) as memory:
                nonzero = next(i for i in range(3, len(memory), 4) if memory[i] & 0x3F)
                memory[nonzero] ^= 0x40  # the top bit of a float's exponent
        assert text_of(answer.result()) != undisturbed
    assert text_of(service.complete(PROMPT)) == undisturbed


def test_decode_never_overcommits_and_prefill_memory_is_the_buffer_A18_A25(
    tiny_llama: Path,
) -> None:
    """100 prompts against a decode pool that holds four of them."""
    block_bytes = 2 * 2 * 2 * 32 * 64 * 4  # heads, layers, K and V, tokens, width, fp32
    pools = ["--prefill-kv-cache-gib", str(150 * block_bytes / 2**30)]
    pools += ["--decode-kv-cache-gib", str(16.5 * block_bytes / 2**30)]
    prompts = [f"{i:02}" + "abcdefghi" * 10 for i in range(100)]
    with serving(tiny_llama, "--dtype", "float32", *pools) as service:
        alone = {p: text_of(service.complete(p, max_tokens=24)) for p in prompts[:3]}
        with ThreadPoolExecutor(100) as pool:
            with stopped(
                service.workers()["decode-0"]
            ):  # decode stands still: prefill fills its own pool
                answers = [pool.submit(service.complete, p, max_tokens=24) for p in prompts]
                eventually(
                    lambda: service.counts()["prefill-0"]["held"] > 75, 30, "half the pool held"
                )
            texts = {p: text_of(a.result()) for p, a in zip(prompts, answers, strict=True)}
        counts = service.counts()
        assert len(texts) == 100
        assert {p: texts[p] for p in alone} == alone
        assert counts["decode-0"]["prefill_tokens"] == 0
        assert counts["prefill-0"]["decode_steps"] == 0
        num_again = counts["decode-0"]["num_preempted"]
        assert counts["decode-0"]["num_pulls"] == 103 + num_again
        eventually(lambda: service.is_all_free, 20, "all blocks free")
        assert all(c["audit_failures"] == 0 for c in service.counts().values())
