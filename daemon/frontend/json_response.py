"""JSON answers, and every refusal in the API's shape with the headers that belong to it."""

import math
from collections.abc import Mapping
from typing import Any

import orjson
from starlette.responses import Response

from daemon.errors import NotReady, QueueFull, ServeError


def json_response(
    content: Any, *, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    return Response(orjson.dumps(content), status, headers, media_type="application/json")


def error_response(error: ServeError, headers: Mapping[str, str] | None = None) -> Response:
    """The refusal as clients of the API expect it, with the time to wait where there is one."""
    all_headers = dict(headers or {}) | _when_to_retry(error)
    return json_response(error.body, status=error.status, headers=all_headers)


def _when_to_retry(error: ServeError) -> dict[str, str]:
    match error:
        case QueueFull() | NotReady():
            retry_after_s = error.retry_after_s
            return {
                "retry-after": str(math.ceil(retry_after_s)),
                "retry-after-ms": str(math.ceil(1000 * retry_after_s)),
            }
        case _:
            return {}
