"""A whole service for tests: the real daemon as a process, and what can be seen of it outside."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

START_S = 150.0
TOLD_WITHIN_S = 60.0


class Service:
    """A running daemon. Its log lines are kept for messages when something goes wrong."""

    def __init__(self, process: subprocess.Popen[str], run_dir: Path) -> None:
        self.process = process
        self.run_dir = run_dir
        self.url = ""
        self.lines: list[str] = []
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip())
            if found := re.search(r"ready: \S+ on (http://\S+)\. Try:", line):
                self.url = found[1]
                self._ready.set()
        self._ready.set()

    @property
    def log(self) -> str:
        return "\n".join(self.lines)

    def until_ready(self) -> None:
        assert self._ready.wait(START_S), self.log
        assert self.url, f"the service ended with {self.process.wait()}:\n{self.log}"

    def until_told(self, text: str, times: int = 1) -> None:
        """Wait for the log to hold a text: a line may come after what it tells of is seen."""
        eventually(lambda: self.log.count(text) >= times, TOLD_WITHIN_S, f"{text!r}:\n{self.log}")

    def close(self) -> None:
        """The process has ended: give back what we hold of it."""
        self._reader.join(5)
        assert self.process.stderr is not None
        self.process.stderr.close()

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60.0)

    def workers(self) -> dict[str, psutil.Process]:
        """Leaders by instance name."""
        ranks = self.ranks().items()
        return {name.removesuffix("/0.0"): rank for name, rank in ranks if name.endswith("/0.0")}

    def ranks(self) -> dict[str, psutil.Process]:
        """All worker processes by name, such as `decode-0/1.0`, as the log tells them."""
        found = {}
        for line in self.lines:
            if match := re.search(r"(\S+) started, process (\d+)", line):
                found[match[1]] = int(match[2])
        return {name: psutil.Process(pid) for name, pid in found.items()}

    def counts(self) -> dict[str, dict[str, float]]:
        """`distserve_instance` and `distserve_kv_blocks` of /metrics, by instance."""
        text = httpx.get(f"{self.url}/metrics").text
        found: dict[str, dict[str, float]] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name in ("distserve_instance", "distserve_kv_blocks"):
                    key = sample.labels.get("count") or sample.labels["state"]
                    found.setdefault(sample.labels["instance"], {})[key] = sample.value
        return found

    @property
    def is_all_free(self) -> bool:
        """Whether no instance holds or uses a block."""
        return all(c["held"] == c["in_use"] == 0 for c in self.counts().values())

    def complete(self, prompt: object, **how: object) -> dict[str, object]:
        body = {"prompt": prompt, "temperature": 0, "max_tokens": 16} | how
        response = httpx.post(f"{self.url}/v1/completions", json=body, timeout=120.0)
        assert response.status_code == 200, response.text
        answer: dict[str, object] = response.json()
        return answer

    def stop(self) -> int:
        """SIGTERM, and its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(30)
        self._reader.join(5)
        return code


def shapes(**degrees: tuple[int, int]) -> list[str]:
    """Flags for the (tp, pp) of each role's instances: `shapes(prefill=(2, 1), decode=(1, 2))`."""
    return [
        flag
        for role, (tp, pp) in degrees.items()
        for flag in (f"--{role}-tp", str(tp), f"--{role}-pp", str(pp))
    ]


@contextmanager
def serving(model: Path, *flags: str, **environment: str) -> Iterator[Service]:
    """A service that can serve, on a free port in a run directory of its own, stopped after."""
    with starting(model, "--port", "0", *flags, **environment) as service:
        service.until_ready()
        yield service


@contextmanager
def starting(model: Path, *flags: str, **environment: str) -> Iterator[Service]:
    """The same from its first moment on; the port is the caller's choice."""
    environment = os.environ | {"PYTHONUNBUFFERED": "1"} | environment
    with tempfile.TemporaryDirectory(prefix="ds-") as run_dir:
        command = [sys.executable, "-P", "-m", "daemon", "serve", "--model", str(model)]
        command += ["--run-dir", run_dir, *flags]
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,  # no terminal, whose end would be the service's
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        service = Service(process, Path(run_dir))
        try:
            yield service
        finally:
            service.stop()
            service.close()


def eventually(holds: Callable[[], bool], within_s: float, what: str) -> None:
    """Wait for something that another process does and does not announce to us."""
    deadline = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline, f"not within {within_s} s: {what}"
        time.sleep(0.02)
