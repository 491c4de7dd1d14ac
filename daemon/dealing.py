"""Passes tokens on: each to its client's stream, and all that came together into the counts.

The hottest path of the daemon, gone through once for every token. So what holds for a whole step
is looked up and told once: the moment at which it was passed on, and how many tokens came how
long after the ones before. What follows for a trip is the controller's business.
"""

from typing import Self

from daemon.generation import Delta
from daemon.metrics import Metrics
from daemon.request import Choice, Request


class Deal:
    """What one event of a leader brought; counted when its `with` block is left."""

    def __init__(self, metrics: Metrics, now_s: float) -> None:
        self._metrics = metrics
        self._now_s = now_s
        self._num_tokens = 0
        self._gaps_s: dict[float, int] = {}  # per token: those of a step mostly have the same

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._metrics.tokens(self._num_tokens, self._gaps_s)

    def pass_on(self, request: Request, choice: Choice, delta: Delta) -> None:
        request.stream.put(delta)
        count = len(delta.token_ids)
        if not count:
            return
        request.clock.token(self._now_s)
        self._num_tokens += count
        gap_s = choice.gap_s(self._now_s)
        if gap_s is not None:
            gap_s /= count
            self._gaps_s[gap_s] = self._gaps_s.get(gap_s, 0) + count
