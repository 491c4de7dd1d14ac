"""How long the daemon's event loop stands still while the worst bodies come in.

    python -m tests.benchmarks.nasty_bodies [--mib 8] [--model models/smollm2]

The HTTP side is the daemon's own, in a process of its own, with nobody behind it; each body is
sent several times, and the longest stall while it was received, read, refused or tokenised is
told, beside the longest stall while nothing was asked.
"""

import argparse
import asyncio
import http.client
import json
import subprocess
import sys
import time
from pathlib import Path

from daemon import http_server
from daemon.chat_template import ChatTemplate
from daemon.frontend.app import build_app
from daemon.frontend.bodies import Limits
from daemon.frontend.served_model import ServedModel
from daemon.text import Tokenizer
from tests.daemon.frontend.fake_submitter import FakeSubmitter
from tests.daemon.frontend.http_service import SwitchedReadiness
from tests.daemon.frontend.nasty_bodies import CHAT_KINDS, nasty_bodies

CONTEXT = 8192
TICK_S = 0.001


class LagMeter:
    """Wants to be called every millisecond, and remembers the longest time that it was not."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._worst_s = 0.0
        self._due_s = self._loop.time() + TICK_S
        self._loop.call_at(self._due_s, self._tick)

    def take(self) -> tuple[str, bytes]:
        """The longest stall since the last call, as the metrics page."""
        worst_s, self._worst_s = self._worst_s, 0.0
        return "text/plain", str(1000 * worst_s).encode()

    def _tick(self) -> None:
        now_s = self._loop.time()
        self._worst_s = max(self._worst_s, now_s - self._due_s)
        self._due_s = now_s + TICK_S
        self._loop.call_at(self._due_s, self._tick)


async def serve(model_dir: Path) -> None:
    tokenizer = Tokenizer.from_directory(model_dir)
    template = ChatTemplate.from_directory(model_dir)
    model = ServedModel(
        id="m", tokenizer=tokenizer, chat_template=template, max_context=CONTEXT, created=0
    )
    submitter = FakeSubmitter(tokenizer, reply="ok", context=CONTEXT)
    meter = LagMeter()
    app = build_app(submitter, model, SwitchedReadiness(), meter.take, Limits())
    with http_server.bind("127.0.0.1", 0) as listener:
        sys.stdout.write(f"{listener.getsockname()[1]}\n")
        sys.stdout.flush()
        await http_server.HttpServer(app).serve(sockets=[listener])


def ask(port: int, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port)
    try:
        connection.request(method, path, body, {"content-type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def measure(port: int, num_bytes: int, repeats: int) -> None:
    for _ in range(2):
        ask(port, "GET", "/metrics")
        time.sleep(1)
    idle_ms = float(ask(port, "GET", "/metrics")[1])
    sys.stdout.write(f"{'nothing':16} {'':>6} {'':>9} {idle_ms:8.1f} ms" + "\n")
    for kind, body in nasty_bodies(num_bytes).items():
        path = "/v1/chat/completions" if kind in CHAT_KINDS else "/v1/completions"
        begin_s = time.monotonic()
        answers = [ask(port, "POST", path, body) for _ in range(repeats)]
        took_s = (time.monotonic() - begin_s) / repeats
        stall_ms = float(ask(port, "GET", "/metrics")[1])
        status, answer = answers[-1]
        reason = json.loads(answer).get("error", {}).get("message", "")[:60]
        sys.stdout.write(f"{kind:16} {status:6} {took_s:8.2f}s {stall_ms:8.1f} ms  {reason}" + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Event-loop stalls under the worst bodies.")
    parser.add_argument("--mib", type=float, default=8.0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--model", type=Path, default=Path("models/smollm2"))
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        asyncio.run(serve(given.model))
        return
    own = [sys.executable, "-m", "tests.benchmarks.nasty_bodies", "--serve"]
    with subprocess.Popen([*own, "--model", str(given.model)], stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        try:
            measure(int(server.stdout.readline()), int(given.mib * 2**20) - 1, given.repeats)
        finally:
            server.terminate()


if __name__ == "__main__":
    main()
