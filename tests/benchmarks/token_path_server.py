"""The daemon's own token path, with costless workers: link, controller, text, HTTP.

Everything but the supervisor is the real thing. Prints its URL when all workers are there, and
for every line that it reads the lags of its event loop since the last one, in seconds, as a JSON
list. The line `stop` ends it.
"""

import asyncio
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any, cast

import orjson
import zmq.asyncio

from daemon import garbage, http_server, worker_link
from daemon.admission import Capacity
from daemon.chat_template import ChatTemplate
from daemon.controller import Controller
from daemon.door import Door
from daemon.frontend.app import build_app
from daemon.frontend.bodies import Limits
from daemon.frontend.served_model import ServedModel
from daemon.instances import Instance
from daemon.loop_lag import LoopLag
from daemon.metrics import Metrics
from daemon.text import Tokenizer
from ipc.messages import Event, Exit, Ready
from ipc.sockets import DaemonSocket
from ipc.vocabulary import InstanceSpec, Parallelism, Role, WorkerName
from tests.benchmarks.costless_worker import EPOCH, LAYOUT

MAX_CONTEXT = 1 << 16
LAG_INTERVAL_S = 0.01


class AlwaysReady:
    refusal = standstill = None


class Starts:
    """In the supervisor's place: an instance is up when its worker is ready; tells the URL when
    all are."""

    def __init__(
        self, link: DaemonSocket, controller: Controller, num_workers: int, url: str
    ) -> None:
        self._link = link
        self._controller = controller
        self._num_workers = num_workers
        self._url = url

    def on_event(self, worker: WorkerName, epoch: int, event: Event) -> None:
        if not isinstance(event, Ready):
            return
        spec = InstanceSpec(worker.instance, Role.MIXED, Parallelism(), ())
        send = partial(self._link.send, worker, epoch)
        self._controller.instance_up(Instance(spec, epoch, LAYOUT, send))
        if len(list(self._controller.instances)) == self._num_workers:
            garbage.settle()
            sys.stdout.write(self._url + "\n")
            sys.stdout.flush()


async def serve(model_dir: Path, endpoint: str, num_workers: int, max_queued: int) -> None:
    tokenizer = Tokenizer.from_directory(model_dir)
    metrics = Metrics("bench")
    controller = Controller(tokenizer, metrics, Door(Capacity(MAX_CONTEXT), max_queued=max_queued))
    model = ServedModel(
        id="bench",
        tokenizer=tokenizer,
        chat_template=ChatTemplate.from_directory(model_dir),
        max_context=MAX_CONTEXT,
        created=int(time.time()),
    )
    link = DaemonSocket(zmq.asyncio.Context(), endpoint)
    workers = [WorkerName(f"mixed-{number}") for number in range(num_workers)]
    for worker in workers:
        link.open_epoch(worker, EPOCH)
    app = build_app(controller, model, AlwaysReady(), partial(metrics.render, {}), Limits())
    server = http_server.HttpServer(app)
    listener = http_server.bind("127.0.0.1", 0)

    starts = Starts(link, controller, num_workers, http_server.url_of(listener))
    nobody: Any = None  # no worker is asked for a sign of life

    lags_s: list[float] = []

    async def until_told_to_stop() -> None:
        while (await asyncio.to_thread(sys.stdin.readline)).strip() not in ("stop", ""):
            sys.stdout.write(orjson.dumps(lags_s).decode() + "\n")
            sys.stdout.flush()
            lags_s.clear()
        for worker in workers:
            link.send(worker, EPOCH, Exit())
        server.stop()

    endless = (
        worker_link.listen(link, cast(Any, starts), controller, nobody),
        LoopLag(lags_s.append, LAG_INTERVAL_S).run(),
        controller.timekeeper.run(),
    )
    background = [asyncio.create_task(forever) for forever in endless]
    await asyncio.gather(server.serve(sockets=[listener]), until_told_to_stop())
    for task in background:
        task.cancel()
    link.close()


if __name__ == "__main__":
    model_dir, endpoint, num_workers, max_queued = sys.argv[1:]
    asyncio.run(serve(Path(model_dir), endpoint, int(num_workers), int(max_queued)))
