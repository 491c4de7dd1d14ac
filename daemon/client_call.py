"""A client's call under way: what the frontend holds of it, and how it is left."""

from collections.abc import Callable, Coroutine
from typing import Any, Self

from daemon.generation import NAMELESS, Delta, Origin, StageTimes, TokenStream
from daemon.request import Request


class ClientCall:
    """All requests of one HTTP call and their stream. Leaving it aborts what is unfinished."""

    def __init__(
        self,
        stream: TokenStream,
        abandon: Callable[[Request], None],
        origin: Origin = NAMELESS,
    ) -> None:
        self._stream = stream
        self._abandon = abandon
        self._origin = origin
        self.requests: list[Request] = []

    def add(self, request: Request) -> None:
        request.label, request.traceparent = self._origin.label, self._origin.traceparent
        self.requests.append(request)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for request in self.requests:
            self._abandon(request)

    def __aiter__(self) -> Self:
        return self

    def __anext__(self) -> Coroutine[Any, Any, list[Delta]]:
        return self._stream.__anext__()

    @property
    def stage_times(self) -> tuple[StageTimes, ...]:
        return tuple(s for r in self.requests if (s := r.clock.stages) is not None)
