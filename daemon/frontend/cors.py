"""Which web pages may read the API's answers: those of the configured origins, else none.

Pure ASGI, outside of everything: it adds headers, also to refusals. What a preflight asks is
answered by whoever answers OPTIONS. Nothing here is a credential: browsers send no cookies.
"""

from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

ANY = "*"
_EXPOSED = b"x-request-id, retry-after, retry-after-ms"
_MAX_AGE_S = b"600"

HeaderList = list[tuple[bytes, bytes]]


class Cors:
    """Names the origin of a request in its answer when that is one of ours."""

    def __init__(self, app: ASGIApp, origins: Sequence[str]) -> None:
        self._app = app
        self._origins = frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = self._headers(scope) if scope["type"] == "http" else []

        async def send_more(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *headers]
            await send(message)

        await self._app(scope, receive, send_more if headers else send)

    def _headers(self, scope: Scope) -> HeaderList:
        """None without origins of our own: then nothing of this exists."""
        if not self._origins:
            return []
        vary = (b"vary", b"origin")
        asked = Headers(scope=scope)
        origin = asked.get("origin")
        if origin is None or not self._origins & {origin, ANY}:
            return [vary]
        named = ANY if ANY in self._origins else origin
        headers = [vary, (b"access-control-allow-origin", named.encode("latin-1"))]
        if scope["method"] == "OPTIONS" and "access-control-request-method" in asked:
            return [*headers, *_preflight(asked)]
        return [*headers, (b"access-control-expose-headers", _EXPOSED)]


def _preflight(asked: Headers) -> HeaderList:
    """Any header may be sent: clients have many of their own, and we read what we know."""
    named = asked.get("access-control-request-headers", "")
    return [
        (b"access-control-allow-methods", b"GET, POST, OPTIONS"),
        (b"access-control-allow-headers", named.encode("latin-1")),
        (b"access-control-max-age", _MAX_AGE_S),
    ]
