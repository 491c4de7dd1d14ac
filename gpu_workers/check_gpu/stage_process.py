"""A process beside the command's in which stages run, one after the other.

Starting one takes seconds (libraries, the device), so it goes on to the next stage as long as they
pass. After one that failed, hung or ended it a new one is started: a device that one stage has left
unusable is a fresh one to the next. What it says are lines of JSON on its stdout; all else that is
written there, and on stderr, goes to a file that is looked at when a stage does not pass.
"""

import contextlib
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
import orjson

from gpu_workers import lifeline
from gpu_workers.check_gpu.outcome import Outcome, Verdict

LOG_BYTES = 12_000  # of the end of what a process said


class Figure(msgspec.Struct, frozen=True, tag=True):
    """A stage noted it."""

    name: str
    value: Any


class Ended(msgspec.Struct, frozen=True, tag=True):
    """A stage has ended."""

    outcome: Outcome


Say = Callable[[Figure | Ended], None]


class StageProcess:
    """Runs stages by name.

    Args:
        command: starts the process; see `serve`.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._log = Path(tempfile.mkstemp(prefix="check-gpu-", suffix=".log")[1])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()
        self._log.unlink(missing_ok=True)

    def run(self, stage: str, limit_s: float) -> Outcome:
        """One stage, ended with all that it has started when its time is over."""
        began_s = time.monotonic()
        process = self._running()
        figures: dict[str, Any] = {}
        try:
            outcome = self._listen(process, stage, began_s + limit_s, figures)
        except TimeoutError:
            detail = f"not done after {limit_s:g} s"
        except BrokenPipeError:
            self._end()
            detail = f"its process ended with {process.returncode} and said nothing"
        else:
            if outcome.verdict is not Verdict.FAIL:
                return outcome
            self._end()
            return msgspec.structs.replace(outcome, log=f"{self._said()}\n{outcome.log}".strip())
        self._end()
        seconds = time.monotonic() - began_s
        return Outcome(stage, Verdict.FAIL, seconds, detail, figures, self._said())

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._end()
        self._lines = queue.SimpleQueue()
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                process_group=0,
            )
        threading.Thread(
            target=_read, args=(self._process.stdout, self._lines), daemon=True
        ).start()
        return self._process

    def _listen(
        self,
        process: subprocess.Popen[bytes],
        stage: str,
        deadline_s: float,
        figures: dict[str, Any],
    ) -> Outcome:
        """Raises TimeoutError, or BrokenPipeError when the process has ended."""
        assert process.stdin is not None
        process.stdin.write(f"{stage}\n".encode())
        process.stdin.flush()
        while True:
            match self._next(deadline_s):
                case Figure(name, value):
                    figures[name] = value
                case Ended(outcome):
                    return outcome

    def _next(self, deadline_s: float) -> Figure | Ended:
        try:
            line = self._lines.get(timeout=max(0.0, deadline_s - time.monotonic()))
        except queue.Empty:
            raise TimeoutError from None
        try:
            return msgspec.convert(orjson.loads(line), Figure | Ended)
        except ValueError:  # an empty line, or half of one: it has ended
            raise BrokenPipeError from None

    def _said(self) -> str:
        text = self._log.read_bytes()[-LOG_BYTES:]
        return text.decode(errors="replace").strip()

    def _end(self) -> None:
        """With all that it has started."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


def serve(run: Callable[[str, Say], Outcome]) -> None:
    """The process's side: run the stages whose names come on stdin, until that ends.

    Args:
        run: runs the stage of that name and says its figures meanwhile.
    """
    told = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # libraries and compilers print, too

    def say(word: Figure | Ended) -> None:
        told.write(orjson.dumps(msgspec.to_builtins(word, str_keys=True)) + b"\n")
        told.flush()

    lifeline.die_with_parent(os.getppid())
    for name in sys.stdin:
        say(Ended(run(name.strip(), say)))


def _read(pipe: Any, lines: "queue.SimpleQueue[bytes]") -> None:
    """Whole lines, and an empty one at the end."""
    with contextlib.suppress(ValueError):  # closed by the other thread
        for line in pipe:
            lines.put(line)
    lines.put(b"")
