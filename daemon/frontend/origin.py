"""Where a call comes from, in its sender's words: its name, and the trace that it belongs to."""

from starlette.datastructures import Headers
from starlette.types import Scope

from daemon.frontend.request_log import RequestRecord
from daemon.generation import Origin

_MAX_TRACEPARENT = 128  # version 0 has 55 characters; later ones may have more


def origin_of(scope: Scope) -> Origin:
    """The request's id as it is logged, and W3C's `traceparent` where it is not absurd."""
    traceparent = Headers(scope=scope).get("traceparent", "")
    is_sound = traceparent.isascii() and len(traceparent) <= _MAX_TRACEPARENT
    return Origin(RequestRecord.of(scope).request_id, traceparent if is_sound else "")
