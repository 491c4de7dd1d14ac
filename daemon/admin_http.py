"""The admin listener: a second HTTP port, on loopback alone, for people and monitors of this node.

`/` is the status page, `/status.json` what it shows, `/metrics` for Prometheus, `/health` as on the
service's port. It only tells; nothing can be changed here, and nobody is asked for a key. Where
somebody else has the port the daemon serves without it and says so. A web page elsewhere cannot
read it by a name that it makes point here: only loopback names are answered.
"""

import base64
import hashlib
import importlib.resources
import logging
import re
import socket
from typing import Protocol

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from daemon import http_server
from daemon.config import NO_LISTENER
from daemon.connection_book import ConnectionBook
from daemon.errors import (
    AlreadyRunning,
    InvalidRequest,
    MethodNotAllowed,
    NotReady,
    RouteNotFound,
)
from daemon.frontend.app import MetricsRender
from daemon.frontend.json_response import error_response, json_response
from daemon.status_view import StatusBoard

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 64
_LOOPBACK = re.compile(r"(localhost|127(\.[0-9]{1,3}){3}|\[::1\])(:[0-9]{1,5})?", re.IGNORECASE)
_HEADERS = {
    "cache-control": "no-store",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
}


class Refusing(Protocol):
    """Whether the service can take requests now."""

    @property
    def refusal(self) -> NotReady | None:
        """Why nothing can be served now; None when it can."""
        ...


class AdminHttp:
    """The listener, bound when it is made; `serve` until `stop`."""

    def __init__(self, host: str, port: int, app: ASGIApp) -> None:
        self.url: str | None = None
        self._listener = _bound(host, port)
        if self._listener is None:
            return
        self.url = http_server.url_of(self._listener)
        book = ConnectionBook(MAX_CONNECTIONS, MAX_CONNECTIONS)
        self._server = http_server.HttpServer(app, book=book)

    async def serve(self) -> None:
        if self._listener is not None:
            logger.info("status page: %s", self.url)
            await self._server.serve(sockets=[self._listener])

    def stop(self) -> None:
        if self._listener is not None:
            self._server.stop()

    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()


def build_admin_app(
    board: StatusBoard, readiness: Refusing, metrics_render: MetricsRender
) -> ASGIApp:
    """The admin listener's application."""
    page = importlib.resources.files("daemon").joinpath("status_page.html").read_text("utf-8")
    page_headers = _HEADERS | {"content-security-policy": content_policy(page)}

    async def status_page(_: Request) -> Response:
        return Response(page, headers=page_headers, media_type="text/html")

    async def status(_: Request) -> Response:
        return Response(board.body, headers=_HEADERS, media_type="application/json")

    async def metrics(_: Request) -> Response:
        content_type, body = metrics_render()
        return Response(body, headers=_HEADERS | {"content-type": content_type})

    async def health(_: Request) -> Response:
        refusal = readiness.refusal
        return json_response({"status": "ready"}) if refusal is None else error_response(refusal)

    routes = {"/": status_page, "/status.json": status, "/metrics": metrics, "/health": health}
    app = Starlette(
        routes=[Route(path, endpoint) for path, endpoint in routes.items()],
        exception_handlers={HTTPException: _on_http_exception},
    )
    app.router.redirect_slashes = False
    return _LoopbackNames(app)


def content_policy(page: str) -> str:
    """Nothing but the page's own style and script, by their hashes, and its own node's answers."""
    return "; ".join(
        [
            "default-src 'none'",
            f"style-src {_hash_of(page, 'style')}",
            f"script-src {_hash_of(page, 'script')}",
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        ]
    )


class _LoopbackNames:
    """Pure ASGI middleware: refuses requests that reached this machine by any other name."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or _LOOPBACK.fullmatch(Headers(scope=scope).get("host", "")):
            await self._app(scope, receive, send)
            return
        refusal = error_response(InvalidRequest("Ask for this listener by a loopback address."))
        await refusal(scope, receive, send)


def _bound(host: str, port: int) -> socket.socket | None:
    if host == NO_LISTENER:
        return None
    try:
        return http_server.bind(host, port)
    except AlreadyRunning:
        logger.warning(
            "no status page: somebody has %s:%d already; choose another --admin-port", host, port
        )
        return None


def _hash_of(page: str, element: str) -> str:
    """The content security policy's name for the one inline element of a kind."""
    (text,) = re.findall(rf"<{element}>(.*?)</{element}>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"


async def _on_http_exception(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == MethodNotAllowed.status:
        refusal = MethodNotAllowed("The path does not take this method.")
        return error_response(refusal, error.headers)
    return error_response(RouteNotFound("There is no such path."), error.headers)
