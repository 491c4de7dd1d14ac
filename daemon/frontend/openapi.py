"""The API's operations, and their description as an OpenAPI document.

Routes are made from these operations, bodies are described by the very types that check them,
refusals by the classes that make them: there is nothing to keep in step by hand.
"""

import importlib.metadata
from collections.abc import Iterable, Iterator
from http import HTTPStatus
from typing import Any

import msgspec

from daemon.errors import ServeError
from daemon.frontend import answer_types as answers
from daemon.frontend.schema import ChatBody, CompletionBody


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """One verb of one path. `name` is the handler's; `chunk` is one event of its stream."""

    name: str
    path: str
    summary: str
    answer: type | None
    method: str = "GET"
    body: type | None = None
    chunk: type | None = None
    content_type: str = "application/json"

    @property
    def public_path(self) -> str:
        """Without how the router is to read its parameter."""
        return self.path.replace(":path", "")


OPERATIONS = (
    Operation(
        name="completions",
        method="POST",
        path="/v1/completions",
        summary="Continue texts.",
        body=CompletionBody,
        answer=answers.Completion,
        chunk=answers.CompletionChunk,
    ),
    Operation(
        name="chat_completions",
        method="POST",
        path="/v1/chat/completions",
        summary="Answer in a chat.",
        body=ChatBody,
        answer=answers.ChatCompletion,
        chunk=answers.ChatCompletionChunk,
    ),
    Operation(
        name="models", path="/v1/models", summary="List the models.", answer=answers.ModelList
    ),
    Operation(
        name="model",
        path="/v1/models/{model_id:path}",
        summary="Look a model up.",
        answer=answers.ModelCard,
    ),
    Operation(
        name="health", path="/health", summary="Can requests be served?", answer=answers.Status
    ),
    Operation(
        name="live",
        path="/health/live",
        summary="Does the process live?",
        answer=answers.Status,
    ),
    Operation(
        name="health_ready",
        path="/health/ready",
        summary="Can requests be served, and do those that were taken get on?",
        answer=answers.Status,
    ),
    Operation(
        name="ready", path="/ready", summary="The same as /health/ready.", answer=answers.Status
    ),
    Operation(
        name="ping", path="/ping", summary="The same as /health/live.", answer=answers.Status
    ),
    Operation(
        name="metrics",
        path="/metrics",
        summary="Counts and latencies for Prometheus.",
        answer=None,
        content_type="text/plain",
    ),
    Operation(
        name="version",
        path="/version",
        summary="Which version this is.",
        answer=answers.Version,
    ),
    Operation(name="openapi", path="/openapi.json", summary="This document.", answer=None),
)

_SCHEMAS = "#/components/schemas/{name}"
_STREAM = (
    "With `stream`, events `data: {{chunk}}` of the type {chunk}, then `data: [DONE]`. "
    "A failure after the first of them is one event `data: {{ErrorBody}}` before that."
)


def document() -> dict[str, Any]:
    """The description of the whole API."""
    types = {answers.ErrorBody, *_types_of_operations()}
    _, schemas = msgspec.json.schema_components(sorted(types, key=_name), ref_template=_SCHEMAS)
    refusals = _refusals()
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        verbs = paths.setdefault(operation.public_path, {})
        verbs[operation.method.lower()] = _described(operation, refusals)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "distserved",
            "version": importlib.metadata.version("distserved"),
            "description": "The OpenAI completions API, served with prefill and decode apart.",
        },
        "paths": paths,
        "components": {"schemas": schemas, "responses": refusals},
    }


def _types_of_operations() -> Iterator[type]:
    for operation in OPERATIONS:
        for kind in (operation.body, operation.answer, operation.chunk):
            if kind is not None:
                yield kind


def _described(operation: Operation, refusals: Iterable[str]) -> dict[str, Any]:
    responses = {status: {"$ref": f"#/components/responses/{status}"} for status in refusals}
    described: dict[str, Any] = {
        "operationId": operation.name,
        "summary": operation.summary,
        "responses": {"200": _success(operation), **responses},
    }
    if operation.body is not None:
        content = {"application/json": {"schema": _reference(operation.body)}}
        described["requestBody"] = {"required": True, "content": content}
    if "{" in operation.path:
        name = operation.public_path.partition("{")[2].rstrip("}")
        parameter = {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        described["parameters"] = [parameter]
    return described


def _success(operation: Operation) -> dict[str, Any]:
    schema = {} if operation.answer is None else _reference(operation.answer)
    content = {operation.content_type: {"schema": schema}}
    if operation.chunk is None:
        return {"description": operation.summary, "content": content}
    content["text/event-stream"] = {}
    return {"description": _STREAM.format(chunk=_name(operation.chunk)), "content": content}


def _refusals() -> dict[str, Any]:
    """By status: which codes it may come with, and the first line of what each of them means."""
    meanings: dict[int, list[str]] = {}
    for kind in _all_kinds(ServeError):
        meaning = (kind.__doc__ or "").partition("\n")[0]
        meanings.setdefault(kind.status, []).append(f"`{kind.code or kind.kind}`: {meaning}")
    content = {"application/json": {"schema": _reference(answers.ErrorBody)}}
    return {
        str(status): {
            "description": f"{HTTPStatus(status).phrase}. " + " ".join(meanings[status]),
            "content": content,
        }
        for status in sorted(meanings)
    }


def _all_kinds(kind: type[ServeError]) -> Iterator[type[ServeError]]:
    for inner in kind.__subclasses__():
        yield inner
        yield from _all_kinds(inner)


def _reference(kind: type) -> dict[str, str]:
    return {"$ref": _SCHEMAS.format(name=_name(kind))}


def _name(kind: type) -> str:
    return kind.__name__
