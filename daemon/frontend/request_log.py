"""The outermost layer: names every request, logs it in one line, and turns failures into errors.

Never logs what a client wrote, only counts and names of our own: the route's template instead of
the path, the name of a key instead of the key, and a request id that was checked.
"""

import logging
import re
import time
import uuid
from collections.abc import Callable, Sequence

import msgspec
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from daemon.errors import ServiceFailed
from daemon.frontend.json_response import error_response
from daemon.generation import StageTimes
from ipc.journal import with_fields

logger = logging.getLogger(__name__)

_SAFE_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
_KEY = "distserved.record"


class RequestRecord:
    """What is known of one request by the time it is logged.

    `send_on` is the server's own way to send, for what follows the head of a long answer: all
    that layers between look at is heads, and each of them costs something for every token.
    """

    def __init__(self, request_id: str, send_on: Send) -> None:
        self.request_id = request_id
        self.send_on = send_on
        self.status: int | None = None
        self.error: str | None = None
        self.key_name: str | None = None
        self.num_prompt_tokens: int | None = None
        self.num_output_tokens: int | None = None
        self.stage_times: Sequence[StageTimes] = ()
        self.on_first_token: Callable[[], None] = lambda: None
        self._begin_s = time.perf_counter()
        self._first_token_s: float | None = None

    @staticmethod
    def of(scope: Scope) -> "RequestRecord":
        """The record of the request that is being served."""
        record = scope[_KEY]
        assert isinstance(record, RequestRecord)
        return record

    def saw_tokens(self) -> None:
        """Call it with every batch of tokens; the first one is the time to first token."""
        if self._first_token_s is None:
            self._first_token_s = time.perf_counter()
            self.on_first_token()

    def log(self, scope: Scope) -> None:
        """One line for people and for grep; where lines are JSON, an object with the same facts."""
        facts = self._facts(scope)
        # Balancers ask for health several times a second, forever.
        level = logging.DEBUG if scope["path"].startswith("/health") else logging.INFO
        logger.log(
            level,
            "request %s %s %s %s",
            self.request_id,
            facts["method"],
            facts["route"],
            " ".join(f"{key}={_or_dash(facts[key])}" for key in facts if key not in _BEFORE),
            extra=with_fields(facts),
        )

    def _facts(self, scope: Scope) -> dict[str, object]:
        """All that is told, in the line's order; what does not always apply only where it does."""
        first_s = self._first_token_s
        facts: dict[str, object] = {
            "request_id": self.request_id,
            "method": scope["method"] if scope["method"] in _METHODS else "other",
            "route": getattr(scope.get("route"), "path", "unmatched"),
            "status": 499 if self.status is None else self.status,
            "prompt_tokens": self.num_prompt_tokens,
            "output_tokens": self.num_output_tokens,
            "ttft_ms": None if first_s is None else _ms(first_s - self._begin_s),
            "total_ms": _ms(time.perf_counter() - self._begin_s),
        }
        if self.key_name is not None:
            facts["key"] = self.key_name
        for stage, seconds in _slowest(self.stage_times).items():
            facts[f"{stage.removesuffix('_s')}_ms"] = _ms(seconds)
        if self.error is not None:
            facts["error"] = self.error
        return facts


class RequestLog:
    """Pure ASGI middleware: adds `x-request-id` to every response and logs every request."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = scope[_KEY] = RequestRecord(_request_id(scope), send)
        header = (b"x-request-id", record.request_id.encode())

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                message["headers"] = [*message.get("headers", ()), header]
            await send(message)

        try:
            await self._app(scope, receive, send_named)
        except Exception:
            logger.exception("request %s failed", record.request_id)
            record.error = "internal_error"
            if record.status is None:
                response = error_response(ServiceFailed())
                await response(scope, receive, send_named)
        finally:
            record.log(scope)
            # It knows the server's end, which knows the scope: a circle that would stay in memory.
            del scope[_KEY]


_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
_BEFORE = ("request_id", "method", "route")


def _request_id(scope: Scope) -> str:
    """The client's own name for the request, if it is harmless."""
    given = Headers(scope=scope).get("x-request-id", "")
    return given if _SAFE_ID.fullmatch(given) else uuid.uuid4().hex


def _slowest(stage_times: Sequence[StageTimes]) -> dict[str, float]:
    """The stages of the prompt that took longest, of a call that may have several."""
    if not stage_times:
        return {}
    every = [msgspec.structs.asdict(times) for times in stage_times]
    return max(every, key=lambda times: sum(times.values()))


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 1)


def _or_dash(value: object) -> str:
    return "-" if value is None else str(value)
