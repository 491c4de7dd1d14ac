"""The HTTP face: routes, body limits, and errors in the API's shape.

Knows the controller only as a `Submitter`. Health and readiness never ask a worker: they repeat
what the `Readiness` at hand says.
"""

import importlib.metadata
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from daemon.api_keys import KeyRing
from daemon.errors import (
    InvalidRequest,
    MethodNotAllowed,
    NotReady,
    RouteNotFound,
    ServeError,
    ServiceFailed,
)
from daemon.frontend.auth import Auth
from daemon.frontend.bodies import Bodies, Limits
from daemon.frontend.calls import Call, plan_chat, plan_completion
from daemon.frontend.cors import Cors
from daemon.frontend.json_response import error_response, json_response
from daemon.frontend.openapi import OPERATIONS, document
from daemon.frontend.reply import Reply
from daemon.frontend.request_log import RequestLog, RequestRecord
from daemon.frontend.schema import ChatBody, CompletionBody
from daemon.frontend.served_model import ServedModel
from daemon.frontend.turnstile import Turnstile
from daemon.frontend.unknown_fields import UnknownFields
from daemon.generation import Submitter

MetricsRender = Callable[[], tuple[str, bytes]]
Handler = Callable[[Request], Awaitable[ASGIApp]]


class Readiness(Protocol):
    """Whether the service can take requests now."""

    @property
    def refusal(self) -> NotReady | None:
        """Why nothing can be served now; None when it can."""
        ...


class Progress(Readiness, Protocol):
    """And whether the service gets on with those that it has taken."""

    @property
    def standstill(self) -> NotReady | None:
        """The same, and beyond that why nothing that was taken gets on."""
        ...


def build_app(
    submitter: Submitter,
    model: ServedModel,
    readiness: Progress,
    metrics_render: MetricsRender,
    limits: Limits,
    cors_origins: Sequence[str] = (),
    keys: KeyRing | None = None,
    unknown: UnknownFields | None = None,
) -> ASGIApp:
    """The whole HTTP application. `metrics_render` returns a content type and a body.

    Without `keys` everybody may use it. `unknown` counts fields of bodies that are ignored.
    """
    endpoints = _Endpoints(submitter, model, limits, unknown)
    status = _StatusEndpoints(readiness, metrics_render)
    handlers: dict[str, Handler] = {
        "completions": endpoints.completions,
        "chat_completions": endpoints.chat_completions,
        "models": endpoints.models,
        "model": endpoints.model,
        "health": status.health,
        "live": status.live,
        "health_ready": status.ready,
        "ready": status.ready,
        "ping": status.live,
        "metrics": status.metrics,
        "version": status.version,
        "openapi": status.openapi,
    }
    app = Starlette(
        routes=[
            Route(each.path, handlers[each.name], methods=[each.method]) for each in OPERATIONS
        ],
        exception_handlers={
            ServeError: _on_serve_error,
            HTTPException: _on_http_exception,
            ClientDisconnect: _on_disconnect,
            Exception: _on_unexpected,
        },
    )
    app.router.redirect_slashes = False
    inside: ASGIApp = Turnstile(app)
    return Cors(RequestLog(inside if keys is None else Auth(inside, keys)), cors_origins)


class _Endpoints:
    """The API itself."""

    def __init__(
        self,
        submitter: Submitter,
        model: ServedModel,
        limits: Limits,
        unknown: UnknownFields | None,
    ) -> None:
        self._submitter = submitter
        self._model = model
        self._limits = limits
        # One thread: the loop has to wait for one of them at most until it has its turn again.
        self._aside = ThreadPoolExecutor(1, thread_name_prefix="large")
        self._bodies = Bodies(limits, self._aside, unknown)

    async def completions(self, request: Request) -> ASGIApp:
        async with self._bodies.body_of(request, CompletionBody) as body:
            call = await plan_completion(body, self._model, self._submitter.max_output)
        return self._reply(call)

    async def chat_completions(self, request: Request) -> ASGIApp:
        async with self._bodies.body_of(request, ChatBody) as body:
            call = await plan_chat(body, self._model, self._submitter.max_output)
        return self._reply(call)

    async def models(self, _: Request) -> Response:
        return json_response({"object": "list", "data": [self._model.card]})

    async def model(self, request: Request) -> Response:
        self._model.check_name(request.path_params["model_id"])
        return json_response(self._model.card)

    def _reply(self, call: Call) -> ASGIApp:
        stall_s = self._limits.stall_s
        return Reply(call, self._submitter, self._model, self._aside, stall_s=stall_s)


class _StatusEndpoints:
    """What balancers, monitors and people ask for."""

    def __init__(self, readiness: Progress, metrics_render: MetricsRender) -> None:
        self._readiness = readiness
        self._metrics_render = metrics_render
        self._document = document()

    async def health(self, _: Request) -> Response:
        refusal = self._readiness.refusal
        return json_response({"status": "ready"}) if refusal is None else error_response(refusal)

    async def ready(self, _: Request) -> Response:
        refusal = self._readiness.standstill
        return json_response({"status": "ready"}) if refusal is None else error_response(refusal)

    async def live(self, _: Request) -> Response:
        return json_response({"status": "alive"})

    async def metrics(self, _: Request) -> Response:
        content_type, body = self._metrics_render()
        return Response(body, headers={"content-type": content_type})

    async def version(self, _: Request) -> Response:
        return json_response({"version": importlib.metadata.version("distserved")})

    async def openapi(self, _: Request) -> Response:
        return json_response(self._document)


async def _on_serve_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ServeError)
    RequestRecord.of(request.scope).error = error.code or error.kind
    return error_response(error)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """What the router refuses: no such path, or no such verb for it.

    OPTIONS is a verb of every path: it tells the others, and carries what `Cors` adds.
    """
    assert isinstance(error, HTTPException)
    headers = error.headers
    match error.status_code:
        case 404:
            return error_response(RouteNotFound("There is no such path."), headers)
        case 405 if request.method == "OPTIONS":
            others = (headers or {}).get("Allow", "")
            return Response(status_code=204, headers={"allow": f"{others}, OPTIONS"})
        case 405:
            return error_response(MethodNotAllowed("The path does not take this method."), headers)
        case _:
            return error_response(InvalidRequest(error.detail), headers)


async def _on_disconnect(request: Request, _: Exception) -> Response:
    """The client left while it was still sending; this response goes nowhere."""
    RequestRecord.of(request.scope).error = "client_gone"
    return Response(status_code=499)


async def _on_unexpected(_: Request, __: Exception) -> Response:
    """The outermost layer logs it."""
    return error_response(ServiceFailed())
