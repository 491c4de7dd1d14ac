"""The outermost layer: names every request, logs it in one line, and turns failures into errors.

Never logs what a client wrote, only counts and names of our own: the route's template instead of
the path, and a request id that was checked.
"""

import logging
import re
import time
import uuid

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from daemon.errors import ServiceFailed
from daemon.frontend.json_response import error_response

logger = logging.getLogger(__name__)

_SAFE_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
_KEY = "distserved.record"


class RequestRecord:
    """What is known of one request by the time it is logged."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.status: int | None = None
        self.error: str | None = None
        self.num_prompt_tokens: int | None = None
        self.num_output_tokens: int | None = None
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

    def log(self, scope: Scope) -> None:
        """One line for people and for grep."""
        ttft_ms = None
        if self._first_token_s is not None:
            ttft_ms = round(1000 * (self._first_token_s - self._begin_s), 1)
        # Balancers ask for health several times a second, forever.
        level = logging.DEBUG if scope["path"].startswith("/health") else logging.INFO
        logger.log(
            level,
            "request %s %s %s status=%s prompt_tokens=%s output_tokens=%s ttft_ms=%s total_ms=%s%s",
            self.request_id,
            scope["method"] if scope["method"] in _METHODS else "other",
            getattr(scope.get("route"), "path", "unmatched"),
            _or_dash(499 if self.status is None else self.status),
            _or_dash(self.num_prompt_tokens),
            _or_dash(self.num_output_tokens),
            _or_dash(ttft_ms),
            round(1000 * (time.perf_counter() - self._begin_s), 1),
            "" if self.error is None else f" error={self.error}",
        )


class RequestLog:
    """Pure ASGI middleware: adds `x-request-id` to every response and logs every request."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = scope[_KEY] = RequestRecord(_request_id(scope))
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


_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")


def _request_id(scope: Scope) -> str:
    """The client's own name for the request, if it is harmless."""
    given = Headers(scope=scope).get("x-request-id", "")
    return given if _SAFE_ID.fullmatch(given) else uuid.uuid4().hex


def _or_dash(value: float | None) -> str:
    return "-" if value is None else str(value)
