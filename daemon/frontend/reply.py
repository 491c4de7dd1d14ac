"""Carry out one call: submit it, and send its answer as it comes or as a whole.

A `Reply` is an ASGI application like any response. Leaving it, by whatever way, leaves the
generation's `with` block and so aborts what is unfinished. Before the first byte an error keeps
its own HTTP status; after it, the stream says so in an event and ends.
"""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Executor
from typing import TypeVar

from starlette.types import Receive, Scope, Send

from daemon.errors import ServeError, ServiceFailed
from daemon.frontend.answers import StreamedAnswer, WholeAnswer, error_event
from daemon.frontend.calls import Call
from daemon.frontend.client import Client, ClientGone, ClientStalled, Headers
from daemon.frontend.origin import origin_of
from daemon.frontend.request_log import RequestRecord
from daemon.frontend.served_model import ServedModel
from daemon.generation import Delta, Generation, Submitter

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

MAX_SCORES_AT_ONCE = 1000  # a millisecond or two

_STREAM_HEADERS: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class Reply:
    """The answer to one call; the request's record is told what there is to log of it.

    `aside` is where answers with the log probabilities of long prompts are put into words, which
    takes seconds.
    """

    def __init__(
        self,
        call: Call,
        submitter: Submitter,
        model: ServedModel,
        aside: Executor,
        *,
        stall_s: float,
    ) -> None:
        self._call = call
        self._submitter = submitter
        self._model = model
        self._aside = aside
        self._stall_s = stall_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        record = RequestRecord.of(scope)
        record.num_prompt_tokens = self._call.num_prompt_tokens
        try:
            async with Client(receive, send, record.send_on, stall_s=self._stall_s) as client:
                with self._submitter.submit(self._call.specs, origin_of(scope)) as generation:
                    answer = self._stream if self._call.stream else self._send_whole
                    # Woken for every token: in a task of its own it does not pass through all
                    # layers between the server and here each time.
                    await asyncio.create_task(answer(generation, client, record))
        except ClientStalled:
            record.error = "client_stalled"
        except ClientGone:
            record.error = "client_gone"

    async def _send_whole(
        self, generation: Generation, client: Client, record: RequestRecord
    ) -> None:
        answer = WholeAnswer(self._call, self._model)
        async for deltas in generation:
            record.saw_tokens()
            await self._aside_if_long(answer.take, deltas)
            record.num_output_tokens = answer.num_output_tokens
        record.stage_times = generation.stage_times
        body = answer.body(record.stage_times)
        length = str(len(body)).encode()
        await client.begin([(b"content-type", b"application/json"), (b"content-length", length)])
        await client.send(body, more=False)

    async def _stream(self, generation: Generation, client: Client, record: RequestRecord) -> None:
        try:
            await self._send_events(generation, client, record)
        except ServeError as error:
            if not client.has_begun:
                raise
            record.error = error.code or error.kind
            await client.send(error_event(error), more=False)
        except Exception:
            if not client.has_begun:
                raise
            logger.exception("request %s failed after its first byte", record.request_id)
            record.error = "internal_error"
            await client.send(error_event(ServiceFailed()), more=False)

    async def _send_events(
        self, generation: Generation, client: Client, record: RequestRecord
    ) -> None:
        """One send for all that has come since the last one."""
        answer = StreamedAnswer(self._call, self._model)
        async for deltas in generation:
            events = await self._aside_if_long(answer.take, deltas)
            record.num_output_tokens = answer.num_output_tokens
            if events:
                if not client.has_begun:
                    record.saw_tokens()
                    await client.begin(_STREAM_HEADERS)
                await client.send(events)
        if not client.has_begun:
            await client.begin(_STREAM_HEADERS)
        record.stage_times = generation.stage_times
        await client.send(answer.ending(record.stage_times), more=False)

    @property
    def _is_long(self) -> bool:
        call = self._call
        if call.echoes is None or call.logprobs is None:
            return False
        return call.num_prompt_tokens * (1 + call.logprobs) > MAX_SCORES_AT_ONCE

    async def _aside_if_long(
        self, take: Callable[[list[Delta]], Result], deltas: list[Delta]
    ) -> Result:
        if not self._is_long:
            return take(deltas)
        return await asyncio.get_running_loop().run_in_executor(self._aside, take, deltas)
