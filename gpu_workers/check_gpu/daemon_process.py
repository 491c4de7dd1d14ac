"""A running `distserve serve` of a small model, as clients and operators see it: HTTP and log."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from gpu_workers.check_gpu.backend import Backend
from gpu_workers.check_gpu.outcome import CheckFailed, require

TOGETHER = 8
ENDED, UNAVAILABLE = "(the daemon has ended)", 503
START_S, REQUEST_S, STOP_S = 90.0, 60.0, 20.0
LOOKS = 200


class Answer(NamedTuple):
    """A streamed one, and when its parts came, in seconds from the asking."""

    tokens: list[int]
    times_s: list[float]

    @property
    def ttft_s(self) -> float:
        return self.times_s[0]

    @property
    def tpot_s(self) -> float:
        return (self.times_s[-1] - self.times_s[0]) / max(1, len(self.tokens) - 1)


class _SentAway(CheckFailed):
    """503: nobody can serve at the moment."""


class DaemonProcess:
    """The service, and what its log has told so far."""

    def __init__(self, process: subprocess.Popen[str], num_tokens: int) -> None:
        self._process, self._num_tokens = process, num_tokens
        self._lines: list[str] = []
        self._has_spoken = threading.Condition()
        self._killed = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._url = ""

    def wait_until_ready(self) -> None:
        """Raises CheckFailed: it has ended, or takes too long."""
        self._url = self._until(r"ready: \S+ on (http://\S+)\. Try:")

    def complete(self, asked: Sequence[list[int]], *, kill: str = "") -> list[Answer]:
        """All of them, some at a time. That instance is killed meanwhile."""
        with ThreadPoolExecutor(TOGETHER) as pool:
            answers = pool.map(self._one, asked)
            if kill:
                self._kill(kill)
            return list(answers)

    def leave_early(self, prompt: list[int]) -> None:
        """Ask, read until the first token has come, and close the connection."""
        with _opened(self._request(prompt, 20 * self._num_tokens)) as answer:
            for line in answer:
                if line.startswith(b"data: {"):
                    return

    def blocks_left(self) -> float:
        """KV blocks that are not free when all is over, by the service's own metrics, which hear
        of the last ones a moment later."""
        return next((0.0 for _ in range(LOOKS) if not self._blocks_in_use()), self._blocks_in_use())

    def close(self) -> None:
        """After the process has ended."""
        self._reader.join()
        assert self._process.stderr is not None
        self._process.stderr.close()

    def _blocks_in_use(self) -> float:
        with _opened(urllib.request.Request(f"{self._url}/metrics")) as answer:
            text = answer.read().decode()
        found = re.findall(r"^distserve_kv_blocks\{(.*)\} (\S+)$", text, re.MULTILINE)
        require(bool(found), "the metrics do not tell of KV blocks")
        return sum(float(count) for labels, count in found if 'state="free"' not in labels)

    def _kill(self, instance: str) -> None:
        """The instance's present leader, as hard as can be."""
        self._killed = instance
        found = [
            re.search(rf"{instance}/0\.0 started, process (\d+)", line) for line in self._lines
        ]
        os.kill(int([match[1] for match in found if match][-1]), signal.SIGKILL)

    def _one(self, prompt: list[int]) -> Answer:
        """Who comes while nobody can serve may be sent away, and comes again when somebody can:
        only what was accepted is kept."""
        try:
            return self._answer(prompt)
        except _SentAway:
            if not self._killed:
                raise
            self._until(rf"{self._killed} (is ready): ", times=2)
            return self._answer(prompt)

    def _answer(self, prompt: list[int]) -> Answer:
        began_s = time.monotonic()
        answer = Answer([], [])
        with _opened(self._request(prompt, self._num_tokens)) as stream:
            for line in stream:
                if line.startswith(b"data: {"):
                    chunk = json.loads(line[6:])
                    require("error" not in chunk, f"a request ended with {chunk.get('error')}")
                    tokens = chunk["choices"][0].get("token_ids") or []
                    answer.tokens.extend(tokens)
                    answer.times_s.append(time.monotonic() - began_s)
        require(bool(answer.tokens), "a request was answered by no token")
        return answer

    def _request(self, prompt: list[int], num_tokens: int) -> urllib.request.Request:
        body = {
            "model": "tiny",
            "prompt": prompt,
            "max_tokens": num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        return urllib.request.Request(
            f"{self._url}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )

    def _read(self) -> None:
        """Lines of the log, which go on to ours: they tell why a stage failed."""
        assert self._process.stderr is not None
        for line in self._process.stderr:
            sys.stderr.write(line)
            self._hear(line.rstrip())
        self._hear(ENDED)

    def _hear(self, line: str) -> None:
        with self._has_spoken:
            self._lines.append(line)
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


@contextlib.contextmanager
def running(
    backend: Backend, model: Path, num_tokens: int, extra: Sequence[str] = ()
) -> Iterator[DaemonProcess]:
    """A service of that model with dummy weights: one prefill, one decode instance.

    Args:
        num_tokens: of each answer.
    """
    command = [sys.executable, "-P", "-m", "daemon", "serve", "--model", str(model)]
    flags = {
        "host": "127.0.0.1", "port": "0", "admin-host": "none", "load-format": "dummy",
        "dtype": backend.dtype.value, "prefill": "1", "decode": "1", "kv-cache-gib": "0.0625",
        "max-context-tokens": "1024", "max-batch": "16", "run-dir": str(model.parent / "run"),
    }  # fmt: skip
    for name, value in flags.items():
        command += [f"--{name}", value]
    process = subprocess.Popen(
        [*command, *extra, *backend.serve_flags()],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    service = DaemonProcess(process, num_tokens)
    try:
        service.wait_until_ready()
        yield service
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        service.close()


def _opened(request: urllib.request.Request) -> Any:
    """The answer, if it is one."""
    try:
        return urllib.request.urlopen(request, timeout=REQUEST_S)
    except urllib.error.HTTPError as refused:
        said = refused.read().decode(errors="replace")
        kind = _SentAway if refused.code == UNAVAILABLE else CheckFailed
        raise kind(f"a request was answered {refused.code}: {said}") from refused
