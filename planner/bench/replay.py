"""Open loop: every request is sent at its time, however late the answers to others are.

TTFT counts from the scheduled arrival, not from the sending: a client that falls behind must not
make the service look better. How far it fell behind is measured.
"""

import asyncio
import time

import numpy as np

from planner.bench.client import Client, connected
from planner.bench.events import Answer, RequestFailed
from planner.bench.live_run import Clocks, Failure, LiveRun, live_run
from planner.bench.options import ReplayOptions
from planner.errors import BenchError
from planner.workload.requests import Requests

_RUN_UP_S = 0.05  # from the start of the clock to the first request


async def replay(url: str, requests: Requests, options: ReplayOptions) -> LiveRun:
    """Send all requests at their times, relative to the first; return when all have ended.

    Raises:
        ServerFailed: the service fails a small request that is sent before the clock starts.
    """
    if not len(requests):
        raise BenchError("there is no request to send")
    async with connected(url, options) as client:
        return await _Replay(client, _from_zero(requests), options).run()


def _from_zero(requests: Requests) -> Requests:
    arrival_s = requests.arrival_s - requests.arrival_s[0]
    return Requests(arrival_s, requests.input_tokens, requests.output_tokens)


class _Replay:
    """One run: who was sent when, and what became of it."""

    def __init__(self, client: Client, requests: Requests, options: ReplayOptions) -> None:
        self._client = client
        self._requests = requests
        self._options = options
        self._sent_s = np.full(len(requests), np.nan)
        self._results: list[Answer | Failure | None] = [None] * len(requests)
        self._num_ended = 0
        self._start_s = 0.0

    async def run(self) -> LiveRun:
        cpu_s = time.process_time()
        self._start_s = time.monotonic() + _RUN_UP_S
        async with asyncio.TaskGroup() as senders:
            for number in range(len(self._requests)):
                body = self._body(number)  # made while there is time
                await self._wait_for(number)
                senders.create_task(self._send(number, body))
                await asyncio.sleep(0)  # it goes before the next body is made
        clocks = Clocks(self._start_s, time.monotonic(), time.process_time() - cpu_s)
        results = [result for result in self._results if result is not None]
        return live_run(self._requests, self._sent_s, results, clocks)

    def _body(self, number: int) -> bytes:
        requests = self._requests
        num_prompt, num_output = requests.input_tokens[number], requests.output_tokens[number]
        return self._client.body(number, int(num_prompt), int(num_output))

    async def _wait_for(self, number: int) -> None:
        """Until its time; where that has passed, only until others have had their turn."""
        due_s = self._start_s + float(self._requests.arrival_s[number])
        await asyncio.sleep(max(0.0, due_s - time.monotonic()))

    async def _send(self, number: int, body: bytes) -> None:
        self._sent_s[number] = time.monotonic() - self._start_s
        try:
            self._results[number] = await self._client.ask(body)
        except RequestFailed as failure:
            self._results[number] = Failure(number, failure.kind, failure.message)
        self._num_ended += 1
        self._options.on_end(self._num_ended)
