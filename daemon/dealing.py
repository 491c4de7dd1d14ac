"""Passes tokens on: each to its client's stream, and all that came together into the counts.

The hottest path of the daemon, gone through once for every token. So what holds for a whole step
is looked up and told once: the moment at which it was passed on, and how many tokens came how
long after the ones before. What follows for a trip is the controller's business.
"""

from daemon.generation import Delta
from daemon.metrics import Metrics
from daemon.request import Choice, Request


class Deal:
    """What one event of a leader brought; `count` it when all is passed on."""

    def __init__(self, now_s: float) -> None:
        self._now_s = now_s
        self._num_tokens = 0
        self._gaps_s: dict[float, int] = {}  # per token: those of a step mostly have the same

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

    def count(self, metrics: Metrics) -> None:
        metrics.tokens(self._num_tokens, self._gaps_s)
