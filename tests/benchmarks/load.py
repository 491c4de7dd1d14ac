"""What the daemon does under more load than it has room for, with workers that cost nothing.

`make bench-load`. First many streams that are open at a time; then a crowd of requests at once
before a bounded queue, each of which comes again when it was told to, until all are answered. The
daemon is pinned to one core; this client and the workers have the others.
"""

import asyncio
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import orjson
import psutil
from rich.console import Console
from rich.table import Table

from tests.gpu_workers.checkpoints import write_tokenizer

NUM_WORKERS = 8
NUM_STREAMS = 2_000
STREAM_STEP_S = 0.25
STREAM_TOKENS = 40
NUM_CROWD = 5_000
NUM_BEFORE = 200
MAX_QUEUED = 1_024
CROWD_PER_S = 500
CROWD_TOKENS = 8
AT_ONCE = 100  # connections that are opened together


class Client(asyncio.Protocol):
    """One streamed completion over one connection; comes again as often as it is refused."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._read = b""
        self._loop = asyncio.get_running_loop()
        self.num_refusals = 0
        self.sent_s = self.first_answer_s = self.answered_s = 0.0
        self.faults: list[str] = []
        self.has_head = self._loop.create_future()
        self.done = self._loop.create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def send(self) -> None:
        self.sent_s = self.sent_s or time.monotonic()
        self._transport.write(self._request)  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        self._read += data
        if not self.first_answer_s:
            self.first_answer_s = time.monotonic()
            self.has_head.set_result(None)
        if self._read.startswith(b"HTTP/1.1 429"):
            self._refused()
        elif data.endswith(b"0\r\n\r\n"):
            self.answered_s = time.monotonic()
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if b"data: [DONE]" not in self._read:
            self.faults.append(f"no end: {self._read[-200:]!r}")
        if not self.has_head.done():
            self.has_head.set_result(None)
        self.done.set_result(None)

    @property
    def num_tokens(self) -> int:
        return self._read.count(b'"text":"')

    def _refused(self) -> None:
        head, _, body = self._read.partition(b"\r\n\r\n")
        headers = dict(line.split(b": ", 1) for line in head.lower().split(b"\r\n")[1:])
        if len(body) < int(headers[b"content-length"]):
            return
        self._read = b""
        self.num_refusals += 1
        if not 1 <= int(headers[b"retry-after"]) <= 120:
            self.faults.append(f"retry-after: {headers[b'retry-after']!r}")
        self._loop.call_later(int(headers[b"retry-after-ms"]) / 1000, self.send)


class Server:
    """The daemon's process: its memory, and how late its loop was."""

    def __init__(self, process: "subprocess.Popen[str]", url: str) -> None:
        self._process = process
        self.where = urlsplit(url)
        self.lags_ms()

    @property
    def rss_kib(self) -> float:
        return float(psutil.Process(self._process.pid).memory_info().rss / 1024)

    def lags_ms(self) -> list[float]:
        """Since the last call."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write("lags\n")
        self._process.stdin.flush()
        return sorted(1000 * lag_s for lag_s in orjson.loads(self._process.stdout.readline()))


@contextmanager
def serving(*, step_s: float, prefill_s: float, max_queued: int) -> Iterator[Server]:
    cores = sorted(os.sched_getaffinity(0))
    others = ",".join(map(str, cores[1:] or cores))
    python = [sys.executable, "-m"]
    with tempfile.TemporaryDirectory(prefix="dsb-") as name:
        write_tokenizer(Path(name))
        (Path(name) / "config.json").write_text("{}")
        endpoint = f"ipc://{name}/w.ipc"
        server = subprocess.Popen(
            ["taskset", "-c", str(cores[0]), *python, "tests.benchmarks.token_path_server",
             name, endpoint, str(NUM_WORKERS), str(max_queued)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        worker = subprocess.Popen(
            ["taskset", "-c", others, *python, "tests.benchmarks.costless_worker", endpoint,
             str(NUM_WORKERS), str(step_s), str(Path(name) / "times"), str(prefill_s)],
        )  # fmt: skip
        assert server.stdout
        os.sched_setaffinity(0, cores[1:] or cores)
        try:
            yield Server(server, server.stdout.readline().strip())
        finally:
            os.sched_setaffinity(0, cores)
            server.communicate("stop\n")
            worker.wait()


class Row(msgspec.Struct, frozen=True):
    what: str
    value: str


async def open_streams(server: Server) -> list[Row]:
    idle_kib = server.rss_kib
    clients = await connected(server, NUM_STREAMS, STREAM_TOKENS)
    for client in clients:
        client.send()
    await asyncio.gather(*(client.has_head for client in clients))
    await asyncio.sleep(1.0)
    num_open = sum(not client.done.done() for client in clients)
    server.lags_ms()
    await asyncio.sleep(4.0)
    lags_ms, open_kib = server.lags_ms(), server.rss_kib
    await asyncio.gather(*(client.done for client in clients))
    num_lost = NUM_STREAMS * STREAM_TOKENS - sum(client.num_tokens for client in clients)
    return [
        Row("open at a time", f"{num_open:,}"),
        Row("tokens/s", f"{NUM_STREAMS / STREAM_STEP_S:,.0f}"),
        Row("memory of each", f"{(open_kib - idle_kib) / NUM_STREAMS:.1f} KiB"),
        *lag_rows(lags_ms),
        Row("streams without their end", str(sum(bool(client.faults) for client in clients))),
        Row("tokens lost", str(num_lost)),
    ]


async def crowd(server: Server) -> list[Row]:
    """After some requests have shown how long prompts take, as in a service that has run."""
    await served(await connected(server, NUM_BEFORE, CROWD_TOKENS))
    clients = await connected(server, NUM_CROWD, CROWD_TOKENS)
    connected_kib = server.rss_kib
    server.lags_ms()
    for client in clients:
        client.send()
    await asyncio.gather(*(client.has_head for client in clients))
    full_kib, burst_ms = server.rss_kib, server.lags_ms()
    await asyncio.gather(*(client.done for client in clients))
    lags_ms = server.lags_ms()
    refused = [client for client in clients if client.num_refusals]
    first_refused = clients.index(refused[0])
    took_s = max(c.answered_s for c in clients) - min(c.sent_s for c in clients)
    refusal_ms = sorted(1000 * (c.first_answer_s - c.sent_s) for c in refused)
    num_lost = NUM_CROWD * CROWD_TOKENS - sum(client.num_tokens for client in clients)
    return [
        Row("taken before the first refusal", f"{first_refused:,}"),
        Row("refused at first", f"{len(refused):,}"),
        Row("refusal after, p50 / p99", f"{median(refusal_ms):.0f} / {p99(refusal_ms):.0f} ms"),
        Row("refusals until all were answered", f"{sum(c.num_refusals for c in clients):,}"),
        Row("all answered after", f"{took_s:.1f} s (the workers need {NUM_CROWD / CROWD_PER_S:g})"),
        Row("memory of each that waits", f"{(full_kib - connected_kib) / MAX_QUEUED:.1f} KiB"),
        *lag_rows(burst_ms, ", the burst"),
        *lag_rows(lags_ms, ", after it"),
        Row("requests without their answer", str(sum(bool(client.faults) for client in clients))),
        Row("tokens lost", str(num_lost)),
    ]


async def served(clients: list[Client]) -> None:
    for client in clients:
        client.send()
    await asyncio.gather(*(client.done for client in clients))


async def connected(server: Server, num_clients: int, num_tokens: int) -> list[Client]:
    body = orjson.dumps(
        {"prompt": "a", "stream": True, "max_tokens": num_tokens, "ignore_eos": True}
    )
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {server.where.netloc}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    make = partial(Client, head.encode() + body)
    loop = asyncio.get_running_loop()
    clients: list[Client] = []
    while len(clients) < num_clients:
        openings = [
            loop.create_connection(make, server.where.hostname, server.where.port)
            for _ in range(min(AT_ONCE, num_clients - len(clients)))
        ]
        clients += [client for _, client in await asyncio.gather(*openings)]
    return clients


def lag_rows(lags_ms: list[float], when: str = "") -> list[Row]:
    figures = f"{median(lags_ms):.1f} / {p99(lags_ms):.1f} / {lags_ms[-1]:.1f} ms"
    return [Row(f"event loop late, p50 / p99 / most{when}", figures)]


def median(values: list[float]) -> float:
    return statistics.median(values) if values else 0.0


def p99(ordered: list[float]) -> float:
    return ordered[int(0.99 * (len(ordered) - 1))] if ordered else 0.0


def show(title: str, rows: list[Row], console: Console) -> None:
    table = Table("what", "figure", title=title)
    for row in rows:
        table.add_row(row.what, row.value)
    console.print(table)


def main() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    console = Console()
    with serving(step_s=STREAM_STEP_S, prefill_s=0.0, max_queued=10_000) as server:
        show(f"{NUM_STREAMS:,} streams", asyncio.run(open_streams(server)), console)
    prefill_s = NUM_WORKERS / CROWD_PER_S
    with serving(step_s=0.05, prefill_s=prefill_s, max_queued=MAX_QUEUED) as server:
        rows = asyncio.run(crowd(server))
        show(f"{NUM_CROWD:,} requests at once, {MAX_QUEUED:,} may wait", rows, console)


if __name__ == "__main__":
    main()
