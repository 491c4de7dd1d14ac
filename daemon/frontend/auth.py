"""Nobody gets past here without a key, once there are keys: every path but health, every verb but
OPTIONS.

Pure ASGI, inside of the request log alone, so that a stranger learns nothing of what is behind:
not which paths there are, not the model's name. The log tells the key's name, never the key.
"""

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from daemon.api_keys import ApiKey, KeyRing
from daemon.errors import InvalidApiKey, KeyLimit
from daemon.frontend.json_response import error_response
from daemon.frontend.request_log import RequestRecord

OPEN_PATHS = frozenset({"/health", "/health/live", "/health/ready"})


class Auth:
    """Pure ASGI middleware."""

    def __init__(self, app: ASGIApp, keys: KeyRing) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or _is_open(scope):
            await self._app(scope, receive, send)
            return
        record = RequestRecord.of(scope)
        try:
            key = self._key_of(scope)
        except InvalidApiKey as error:
            record.error = error.code
            refusal = error_response(error, {"www-authenticate": "Bearer"})
            await refusal(scope, receive, send)
            return
        record.key_name = key.name
        await self._let_in(key, scope, receive, send)

    async def _let_in(self, key: ApiKey, scope: Scope, receive: Receive, send: Send) -> None:
        """Only POST computes anything, so the limits are for it."""
        if scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        record = RequestRecord.of(scope)
        try:
            seat = self._keys.take_seat(key)
        except KeyLimit as error:
            record.error = error.code
            await error_response(error)(scope, receive, send)
            return
        record.on_first_token = seat.has_token
        try:
            await self._app(scope, receive, send)
        finally:
            seat.leave()

    def _key_of(self, scope: Scope) -> ApiKey:
        presented = Headers(scope=scope).getlist("authorization")
        if not presented:
            raise InvalidApiKey("An API key is needed, as `Authorization: Bearer KEY`.")
        scheme, _, token = presented[0].partition(" ")
        if len(presented) > 1 or scheme.lower() != "bearer":
            raise InvalidApiKey("The API key must come as one `Authorization: Bearer KEY`.")
        key = self._keys.find(token.strip().encode("latin-1"))
        if key is None:
            raise InvalidApiKey("Incorrect API key provided.")
        return key


def _is_open(scope: Scope) -> bool:
    return scope["path"] in OPEN_PATHS or scope["method"] == "OPTIONS"
