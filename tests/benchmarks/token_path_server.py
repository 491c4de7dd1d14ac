"""The daemon's own token path, with costless workers: link, controller, text, HTTP.

Everything but the supervisor is the real thing. Prints its URL when all workers are there.
"""

import asyncio
import sys
import time
from functools import partial
from pathlib import Path

import zmq.asyncio

from daemon import http_server
from daemon.admission import Capacity
from daemon.chat_template import ChatTemplate
from daemon.controller import Controller
from daemon.door import Door
from daemon.frontend.app import build_app
from daemon.frontend.bodies import Limits
from daemon.frontend.served_model import ServedModel
from daemon.instances import Instance
from daemon.metrics import Metrics
from daemon.text import Tokenizer
from ipc.messages import Command, Exit, Hello, Ready
from ipc.sockets import DaemonSocket
from ipc.vocabulary import Role, WorkerName
from tests.benchmarks.costless_worker import EPOCH, LAYOUT

MAX_CONTEXT = 1 << 16


class AlwaysReady:
    refusal = None


async def serve(model_dir: Path, endpoint: str, num_workers: int) -> None:
    tokenizer = Tokenizer.from_directory(model_dir)
    metrics = Metrics("bench")
    controller = Controller(tokenizer, metrics, Door(Capacity(MAX_CONTEXT), max_queued=10_000))
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

    def came_up(worker: WorkerName) -> None:
        def send(command: Command) -> None:
            link.send(worker, EPOCH, command)

        controller.instance_up(Instance(worker.instance, EPOCH, Role.MIXED, LAYOUT, send))
        if len(list(controller.instances)) == num_workers:
            sys.stdout.write(http_server.url_of(listener) + "\n")
            sys.stdout.flush()

    async def listen() -> None:
        async for (worker, _), event in link.receive():
            if isinstance(event, Ready):
                came_up(worker)
            elif not isinstance(event, Hello):
                controller.on_event(worker.instance, EPOCH, event)  # type: ignore[arg-type]

    async def until_told_to_stop() -> None:
        await asyncio.to_thread(sys.stdin.readline)
        for worker in workers:
            link.send(worker, EPOCH, Exit())
        server.stop()

    listening = asyncio.create_task(listen())
    await asyncio.gather(server.serve(sockets=[listener]), until_told_to_stop())
    listening.cancel()
    link.close()


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
