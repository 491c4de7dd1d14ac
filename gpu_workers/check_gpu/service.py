"""Stage: the whole daemon over HTTP, with a worker for each phase, and one of them killed.

Tokens are compared with those of one engine in this process. Nothing here is about speed: both
workers share the device.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from gpu_workers.check_gpu.backend import Backend, spec_of
from gpu_workers.check_gpu.driver import Driver
from gpu_workers.check_gpu.outcome import CheckFailed, Found, require
from gpu_workers.check_gpu.tiny_models import TINY, prompts, write_config, write_tokenizer

NUM_REQUESTS, NUM_TOKENS, TOGETHER = 16, 24, 8
START_S, REQUEST_S, STOP_S = 120.0, 60.0, 20.0
SAME_IN_16_BIT = 0.5  # of the requests: a tie that rounds otherwise sends a text another way


def check_service(backend: Backend) -> Found:
    """Requests streamed, then the prefill worker killed while the same ones run again."""
    with tempfile.TemporaryDirectory() as directory:
        path = write_config(Path(directory) / "tiny", TINY)
        write_tokenizer(path)
        asked = prompts(NUM_REQUESTS, 100)
        expected = _expected(backend, path, asked)
        with _service(backend, path, Path(directory) / "run") as daemon:
            first = daemon.complete(asked)
            daemon.kill("prefill-0")
            second = daemon.complete(asked)
    for answers, when in ((first, "at first"), (second, "after a worker was killed")):
        short = [i for i, answer in enumerate(answers) if len(answer) != NUM_TOKENS]
        require(not short, f"requests {short} got too few tokens {when}")
    same = sum(a == b for a, b in zip(first, expected, strict=True))
    require(
        same >= SAME_IN_16_BIT * NUM_REQUESTS,
        f"only {same} of {NUM_REQUESTS} answers are those of an engine in one process",
    )
    again = sum(a == b for a, b in zip(first, second, strict=True))
    figures = {"same_as_engine": same, "same_after_kill": again, "requests": NUM_REQUESTS}
    told = f"{same} of {NUM_REQUESTS} answers as of one engine, all whole after a worker was killed"
    return Found(told, figures)


def _expected(backend: Backend, path: Path, asked: list[list[int]]) -> list[list[int]]:
    spec = spec_of(str(path), backend.dtype, max_context=512, is_dummy=True)
    executor = backend.executor(spec, 64 << 20, is_graphed=False, max_batch=NUM_REQUESTS)
    return Driver(executor).greedy(asked, NUM_TOKENS)


class _Daemon:
    """A running service, and what its log has told so far."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._lines: list[str] = []
        self._has_spoken = threading.Condition()
        threading.Thread(target=self._read, daemon=True).start()
        self._url = self._until(r"ready: \S+ on (http://\S+)\. Try:")

    def complete(self, asked: list[list[int]]) -> list[list[int]]:
        """All of them, some at a time; the tokens of each."""
        with ThreadPoolExecutor(TOGETHER) as pool:
            return list(pool.map(self._one, asked))

    def kill(self, instance: str) -> None:
        """The instance's present process, as hard as can be."""
        found = [
            re.search(rf"{instance}/0\.0 started, process (\d+)", line) for line in self._lines
        ]
        os.kill(int([match[1] for match in found if match][-1]), signal.SIGKILL)

    def _one(self, prompt: list[int]) -> list[int]:
        body = {
            "model": "tiny",
            "prompt": prompt,
            "max_tokens": NUM_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        request = urllib.request.Request(
            f"{self._url}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        tokens: list[int] = []
        with urllib.request.urlopen(request, timeout=REQUEST_S) as answer:
            for line in answer:
                if line.startswith(b"data: {"):
                    chunk = json.loads(line[6:])
                    require("error" not in chunk, f"a request ended with {chunk.get('error')}")
                    tokens += chunk["choices"][0].get("token_ids") or []
        return tokens

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            with self._has_spoken:
                self._lines.append(line.rstrip())
                self._has_spoken.notify_all()
        with self._has_spoken:
            self._lines.append("(the daemon has ended)")
            self._has_spoken.notify_all()

    def _until(self, pattern: str) -> str:
        """What the pattern's group says in the first line of the log that has it."""
        found: list[Any] = []

        def is_there() -> bool:
            found[:] = [m for m in (re.search(pattern, line) for line in self._lines) if m]
            return bool(found) or (bool(self._lines) and self._lines[-1].startswith("(the daemon"))

        with self._has_spoken:
            self._has_spoken.wait_for(is_there, START_S)
        if not found:
            raise CheckFailed("the daemon did not start: " + " | ".join(self._lines[-3:]))
        return str(found[0][1])


@contextlib.contextmanager
def _service(backend: Backend, path: Path, run_dir: Path) -> Iterator[_Daemon]:
    command = [sys.executable, "-P", "-m", "daemon", "serve", "--model", str(path)]
    flags = {
        "host": "127.0.0.1", "port": "0", "admin-host": "none", "load-format": "dummy",
        "dtype": backend.dtype.value, "prefill": "1", "decode": "1", "kv-cache-gib": "0.0625",
        "max-context-tokens": "512", "max-batch": "16", "run-dir": str(run_dir),
    }  # fmt: skip
    for name, value in flags.items():
        command += [f"--{name}", value]
    process = subprocess.Popen(
        [*command, *backend.serve_flags()],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield _Daemon(process)
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        assert process.stderr is not None
        process.stderr.close()
