"""Every instance of a service is replaced in turn while clients stream: none of them notices."""

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.end_to_end.service import Service, serving

NUM_STREAMS = 20
FLAGS = ("--dtype", "float32", "--kv-cache-gib", "0.02", "--prefill", "1", "--decode", "1")


def stream(service: Service, number: int, has_begun: threading.Semaphore) -> list[int]:
    """A long answer's tokens; it must end as it should."""
    body = {"prompt": f"stream {number}", "max_tokens": 300, "stream": True, "ignore_eos": True}
    body |= {"seed": number, "return_token_ids": True}
    token_ids: list[int] = []
    with httpx.stream("POST", f"{service.url}/v1/completions", json=body, timeout=120) as response:
        assert response.status_code == 200
        lines = filter(None, response.iter_lines())
        for line in lines:
            if line == "data: [DONE]":
                break
            (choice,) = json.loads(line.removeprefix("data: "))["choices"]
            token_ids += choice["token_ids"]
            if len(token_ids) == 1:
                has_begun.release()
    assert choice["finish_reason"] == "length"
    return token_ids


def all_streams(service: Service, meanwhile: list[str]) -> list[list[int]]:
    """All at once; while they run, the named instances are restarted one after the other."""
    has_begun = threading.Semaphore(0)
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        streams = [pool.submit(stream, service, i, has_begun) for i in range(NUM_STREAMS)]
        for _ in streams:
            assert has_begun.acquire(timeout=60)
        for name in meanwhile:
            restart(service, name)
        return [one.result() for one in streams]


def restart(service: Service, name: str) -> None:
    command = [sys.executable, "-P", "-m", "daemon", "console", "restart", name, "--yes"]
    command += ["--deadline", "0.5", "--run-dir", str(service.run_dir)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def keep_asking(service: Service, stop: threading.Event) -> list[int]:
    """New requests, on new connections, one after the other; their status codes."""
    codes = []
    while not stop.is_set():
        body = {"prompt": "new", "max_tokens": 2}
        answer = httpx.post(f"{service.url}/v1/completions", json=body, timeout=120)
        codes.append(answer.status_code)
    return codes


def listening_sockets(service: Service) -> set[str]:
    """Of the daemon, by inode."""
    port = f"{int(service.url.rsplit(':', 1)[1]):04X}"
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    inodes = {f[9] for f in map(str.split, lines) if f[1].endswith(f":{port}") and f[3] == "0A"}
    links = set()
    for descriptor in Path(f"/proc/{service.process.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # a connection that was just closed
            links.add(os.readlink(descriptor))
    return {inode for inode in inodes if f"socket:[{inode}]" in links}


@pytest.fixture(scope="module")
def service(tiny_llama: Path) -> Iterator[Service]:
    with serving(tiny_llama, *FLAGS) as running:
        yield running


def test_restarting_every_instance_in_turn_fails_no_request_and_refuses_no_connection(
    service: Service,
) -> None:
    undisturbed = all_streams(service, meanwhile=[])
    before, socket = service.workers(), listening_sockets(service)
    assert len(socket) == 1
    stop = threading.Event()
    with ThreadPoolExecutor(1) as asker:
        asking = asker.submit(keep_asking, service, stop)
        try:
            assert all_streams(service, meanwhile=["decode-0", "prefill-0"]) == undisturbed
        finally:
            stop.set()
        assert set(asking.result()) == {200}
    after = service.workers()
    assert all(after[name].pid != before[name].pid for name in before)
    assert listening_sockets(service) == socket
