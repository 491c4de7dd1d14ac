"""Which prompts have come of late: how many a second and how long, by their level in the queue.

Pure: the clock is passed in. What came counts less the longer ago it was, so nothing of it has to
be kept but two sums a level.
"""

import math

WINDOW_S = 20.0


class RecentPrompts:
    """Averages over the last `window_s`, about."""

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        self._sums: dict[int, tuple[float, float]] = {}  # prompts and tokens, by level
        self._summed_s = -math.inf

    def came(self, level: int, num_tokens: int, now_s: float) -> None:
        """A prompt of that level."""
        self._fade(now_s)
        prompts, tokens = self._sums.get(level, (0.0, 0.0))
        self._sums[level] = (prompts + 1, tokens + num_tokens)

    def below(self, level: int, now_s: float) -> list[tuple[float, int]]:
        """Of each lower level: how many came in a second, and how many tokens one has."""
        self._fade(now_s)
        return [
            (prompts / self._window_s, round(tokens / prompts))
            for other, (prompts, tokens) in self._sums.items()
            if other < level and prompts
        ]

    def _fade(self, now_s: float) -> None:
        left = math.exp((self._summed_s - now_s) / self._window_s)
        self._summed_s = now_s
        for level, (prompts, tokens) in self._sums.items():
            self._sums[level] = (prompts * left, tokens * left)
