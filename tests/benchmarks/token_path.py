"""How fast the daemon streams tokens, and how much later than they were made they arrive.

`make bench-token-path`. Three processes: eight costless workers in one, the daemon's token path
pinned to one core, and this client, which opens all streams over raw sockets and stamps every
token it reads. The added delay runs from the worker's step to the client's read, the client's own
time included.
"""

import asyncio
import bisect
import gc
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import orjson
from rich.console import Console
from rich.table import Table

from tests.gpu_workers.checkpoints import write_tokenizer

_TOKEN = re.compile(rb'"text":"([a-z])"')
NUM_STREAMS = 500
NUM_WORKERS = 8
MAX_QUEUED = 10_000
RATES = (5_000, 10_000, 20_000, 24_000, None)
SECONDS = 4.0


class Outcome(msgspec.Struct, frozen=True):
    """One run: what was asked for, what came, and the added delay in milliseconds."""

    asked_per_s: int | None
    tokens_per_s: float
    p50_ms: float
    p99_ms: float
    server_cpu: float


_Read = tuple[int, float, bytes]
"""Which stream, when, and what."""


class _Stream(asyncio.Protocol):
    """One streamed completion, read as raw bytes."""

    def __init__(self, number: int, request: bytes, seen: list["_Read"]) -> None:
        self._number = number
        self._request = request
        self._seen = seen
        self._tail = b""
        self.done = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        transport.write(self._request)  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        self._seen.append((self._number, time.monotonic(), data))
        self._tail = (self._tail + data)[-16:]
        if b"[DONE]" in self._tail:
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.done.set_result(None)


def measure(rate: int | None, num_streams: int = NUM_STREAMS) -> Outcome:
    """`rate` in tokens per second over all streams; None is as fast as it goes."""
    step_s = num_streams / rate if rate else 0.0
    num_tokens = int(SECONDS / step_s) if rate else 200
    cores = sorted(os.sched_getaffinity(0))
    others = ",".join(map(str, cores[1:] or cores))
    with tempfile.TemporaryDirectory(prefix="dsb-") as name:
        directory = Path(name)
        write_tokenizer(directory)
        (directory / "config.json").write_text("{}")
        endpoint, times_file = f"ipc://{name}/w.ipc", directory / "times"
        python = [sys.executable, "-m"]
        server = subprocess.Popen(
            ["taskset", "-c", str(cores[0]), *python, "tests.benchmarks.token_path_server",
             name, endpoint, str(NUM_WORKERS), str(MAX_QUEUED)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        worker = subprocess.Popen(
            [
                *("taskset", "-c", others),
                *python,
                "tests.benchmarks.costless_worker",
                endpoint,
                str(NUM_WORKERS),
                str(step_s),
                str(times_file),
            ]
        )
        assert server.stdout
        assert server.stdin
        url = server.stdout.readline().strip()
        before_s = _cpu_s(server.pid)
        os.sched_setaffinity(0, cores[1:] or cores)
        gc.disable()  # a collection over all that was read would count as the daemon's delay
        try:
            seen, elapsed_s = asyncio.run(_drive(url, num_streams, num_tokens))
        finally:
            gc.enable()
            os.sched_setaffinity(0, cores)
        cpu_s = _cpu_s(server.pid) - before_s
        server.communicate("stop\n")
        worker.wait()
        steps = orjson.loads(times_file.read_bytes())
    delays = sorted(_delays_ms(seen, steps)) if rate else [0.0]
    count = sum(data.count(b'"text":"') for _, _, data in seen)
    return Outcome(
        rate,
        count / elapsed_s,
        statistics.median(delays),
        delays[int(0.99 * (len(delays) - 1))],
        cpu_s / elapsed_s,
    )


async def _drive(url: str, num_streams: int, num_tokens: int) -> tuple[list[_Read], float]:
    body = orjson.dumps(
        {"prompt": "a", "stream": True, "max_tokens": num_tokens, "ignore_eos": True}
    )
    where = urlsplit(url)
    request = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {where.netloc}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    ).encode() + body
    seen: list[_Read] = []
    loop = asyncio.get_running_loop()
    started_s = time.monotonic()
    streams = []
    for number in range(num_streams):
        _, stream = await loop.create_connection(
            partial(_Stream, number, request, seen), where.hostname, where.port
        )
        streams.append(stream.done)
    await asyncio.gather(*streams)
    return seen, time.monotonic() - started_s


def _delays_ms(seen: list[_Read], steps: list[list[float]]) -> list[float]:
    """From the making of each token to its reading.

    Dispatch deals streams out in turn, so a stream's worker is known by finding the one whose
    clock fits all of its tokens; the newest step of a token's letter before the reading made it.
    """
    warm_s = min(times[0] for times in steps) + 1.0  # before, the delay is that of opening streams
    by_letter = [[[t for i, t in enumerate(times) if i % 26 == k] for k in range(26)]
                 for times in steps]  # fmt: skip
    of_stream: dict[int, list[tuple[float, int]]] = {}
    for number, read_s, data in seen:
        letters = [found[1][0] - 97 for found in _TOKEN.finditer(data)]
        if read_s > warm_s:
            of_stream.setdefault(number, []).extend((read_s, letter) for letter in letters)
    delays: list[float] = []
    for reads in of_stream.values():
        delays += min((_by_worker(reads, made) for made in by_letter), key=sum)
    return delays


def _by_worker(reads: list[tuple[float, int]], made: list[list[float]]) -> list[float]:
    """The delays if this worker had made the tokens; a token none can have made counts high."""
    delays = []
    for read_s, letter in reads:
        index = bisect.bisect_right(made[letter], read_s) - 1
        delays.append(1000 * (read_s - made[letter][index]) if index >= 0 else 1e6)
    return delays


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def show(outcomes: list[Outcome], console: Console) -> None:
    table = Table(title=f"{NUM_STREAMS} streams of {NUM_WORKERS} instances, the daemon on one core")
    for column in ("asked tokens/s", "streamed tokens/s", "added p50 ms", "p99 ms", "its core"):
        table.add_column(column, justify="right")
    for o in outcomes:
        delay = (f"{o.p50_ms:.1f}", f"{o.p99_ms:.1f}") if o.asked_per_s else ("-", "-")
        asked = f"{o.asked_per_s:,}" if o.asked_per_s else "all it can"
        table.add_row(asked, f"{o.tokens_per_s:,.0f}", *delay, f"{o.server_cpu:.0%}")
    console.print(table)


def main() -> None:
    show([measure(rate) for rate in RATES], Console())


if __name__ == "__main__":
    main()
