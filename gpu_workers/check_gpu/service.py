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
import urllib.error
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
ENDED, UNAVAILABLE = "(the daemon has ended)", 503
START_S, REQUEST_S, STOP_S = 120.0, 60.0, 20.0
SAME_IN_16_BIT = 0.5  # of the requests: a tie that rounds otherwise sends a text another way


def check_service(backend: Backend) -> Found:
    """Requests streamed, and the prefill worker killed while the same ones are sent again."""
    with tempfile.TemporaryDirectory() as directory:
        path = write_config(Path(directory) / "tiny", TINY)
        write_tokenizer(path)
        asked = prompts(NUM_REQUESTS, 100)
        expected = _expected(backend, path, asked)
        with _service(backend, path, Path(directory) / "run") as daemon:
            first = daemon.complete(asked)
            second = daemon.complete(asked, kill="prefill-0")
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


class _SentAway(CheckFailed):
    """503: nobody can serve at the moment."""


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
        self._killed = ""
        threading.Thread(target=self._read, daemon=True).start()
        self._url = self._until(r"ready: \S+ on (http://\S+)\. Try:")

    def complete(self, asked: list[list[int]], *, kill: str = "") -> list[list[int]]:
        """All of them, some at a time; the tokens of each. That instance is killed meanwhile."""
        with ThreadPoolExecutor(TOGETHER) as pool:
            answers = pool.map(self._one, asked)
            if kill:
                self._kill(kill)
            return list(answers)

    def _kill(self, instance: str) -> None:
        """The instance's present process, as hard as can be."""
        self._killed = instance
        found = [
            re.search(rf"{instance}/0\.0 started, process (\d+)", line) for line in self._lines
        ]
        os.kill(int([match[1] for match in found if match][-1]), signal.SIGKILL)

    def _one(self, prompt: list[int]) -> list[int]:
        """The tokens of an answer. Who comes while nobody can serve is sent away, and comes again
        when somebody can: only what was accepted is kept."""
        try:
            return self._answer(prompt)
        except _SentAway:
            if not self._killed:
                raise
            self._until(rf"{self._killed} (is ready): ", times=2)
            return self._answer(prompt)

    def _answer(self, prompt: list[int]) -> list[int]:
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
        with _opened(request) as answer:
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
            self._lines.append(ENDED)
            self._has_spoken.notify_all()

    def _until(self, pattern: str, times: int = 1) -> str:
        """What the pattern's group says in a line of the log, once so many have it."""
        found: list[Any] = []

        def is_there() -> bool:
            found[:] = [m for m in (re.search(pattern, line) for line in self._lines) if m]
            has_ended = bool(self._lines) and self._lines[-1] == ENDED
            return len(found) >= times or has_ended

        with self._has_spoken:
            self._has_spoken.wait_for(is_there, START_S)
        if len(found) < times:
            raise CheckFailed("the daemon is not ready: " + " | ".join(self._lines[-3:]))
        return str(found[0][1])


def _opened(request: urllib.request.Request) -> Any:
    """The answer, if it is one."""
    try:
        return urllib.request.urlopen(request, timeout=REQUEST_S)
    except urllib.error.HTTPError as refused:
        said = refused.read().decode(errors="replace")
        kind = _SentAway if refused.code == UNAVAILABLE else CheckFailed
        raise kind(f"a request was answered {refused.code}: {said}") from refused


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
