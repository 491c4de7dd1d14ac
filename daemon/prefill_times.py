"""How long prompts take to prefill: from a measured table, or from the steps that have run here.

Pure: no clock, no sockets; times come in with the steps. Admission predicts with these. Where
nothing is known yet, it is said so by None, and nobody is refused on a guess.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Collection, Iterable
from functools import lru_cache
from itertools import accumulate
from typing import Protocol

from ipc.profile_table import ProfileTable
from ipc.vocabulary import Parallelism

WINDOW_STEPS = 64
MIN_STEPS = 8
"""Before so many steps have run there is no estimate: the first ones of a worker are slow."""


class PrefillTimes(Protocol):
    """What prompts cost their instance, in seconds. Asked with every request, of long queues."""

    def queued_s(self, prompts: Collection[int]) -> float:
        """All that wait, packed together; by the tokens of each."""
        ...

    def alone_s(self, num_tokens: int) -> float:
        """From its step's start to its first token."""
        ...


class PrefillBook:
    """The times of every instance. A table answers for instances of the shape it was made for."""

    def __init__(self, table: ProfileTable | None = None) -> None:
        self._table = None if table is None else TableTimes(table)
        self._shape = None if table is None else Parallelism(table.tp, table.pp)
        self._steps: dict[tuple[str, Parallelism], StepTimes] = {}

    def of(self, instance: str, shape: Parallelism) -> PrefillTimes | None:
        """None while nothing is known of such prefills."""
        if self._table is not None and shape == self._shape:
            return self._table
        steps = self._steps.get((instance, shape))
        return steps if steps is not None and steps.is_known else None

    def steps_of(self, instance: str, shape: Parallelism) -> "StepTimes":
        """Where an instance's steps are entered. It keeps them when it is restarted; under another
        placement, an instance of its name may have another shape."""
        return self._steps.setdefault((instance, shape), StepTimes())


class StepTimes:
    """Seconds per token of the last steps: their median, weighed by tokens.

    Weighed, since the many short prompts of a load say little about the long ones that make the
    queue; the median, since a step during which the machine slept says nothing at all. While
    prompts wait, a step's time runs from the end of the one before: so what keeps an instance from
    starting the next one (blocks that are still held for decode, steps that decode) counts too.
    """

    def __init__(self) -> None:
        self._steps: deque[_Step] = deque(maxlen=WINDOW_STEPS)
        self._is_busy = False
        self._token_s: float | None = None

    def saw(self, num_tokens: int, started_s: float, ended_s: float, *, has_more: bool) -> None:
        """A prompt has been prefilled; those with the same end shared a step. `has_more`: others
        wait there."""
        last = self._steps[-1] if self._steps else None
        if last is not None and last.ended_s == ended_s:
            last.num_tokens += num_tokens
        else:
            begun_s = started_s
            if last is not None:
                begun_s = last.ended_s if self._is_busy else max(started_s, last.ended_s)
            self._steps.append(_Step(num_tokens, begun_s, ended_s))
        self._is_busy, self._token_s = has_more, None

    @property
    def is_known(self) -> bool:
        return len(self._steps) >= MIN_STEPS

    @property
    def token_s(self) -> float:
        """Looked up with every request, changed by every step."""
        if self._token_s is None:
            self._token_s = _weighed_median((s.token_s, s.num_tokens) for s in self._steps)
        return self._token_s

    def queued_s(self, prompts: Collection[int]) -> float:
        return self.token_s * sum(prompts)

    def alone_s(self, num_tokens: int) -> float:
        return self.token_s * num_tokens


class TableTimes:
    """From a table by `distserve profile`: interpolated between its prompt lengths, and beyond
    them along the last two. Prompts that wait are packed as the best measured step packs them, and
    as many steps as there are stages are under way at a time."""

    def __init__(self, table: ProfileTable) -> None:
        alone_ms: dict[int, float] = {}
        packed_ms: dict[int, float] = {}
        for point in table.prefill:
            length, share_ms = point.num_tokens, point.ms / point.num_prompts / table.pp
            packed_ms[length] = min(share_ms, packed_ms.get(length, share_ms))
            alone_ms[length] = min(point.ms, alone_ms.get(length, point.ms))
        shortest = min(alone_ms)
        self._alone = _Line({0: alone_ms[shortest]} | alone_ms)
        packed = _Line({0: 0.0} | _never_falling(packed_ms))
        self._packed_s = lru_cache(maxsize=4096)(packed.seconds)  # queues repeat lengths

    def queued_s(self, prompts: Collection[int]) -> float:
        return sum(map(self._packed_s, prompts))

    def alone_s(self, num_tokens: int) -> float:
        return self._alone.seconds(num_tokens)


class _Step:
    def __init__(self, num_tokens: int, begun_s: float, ended_s: float) -> None:
        self.num_tokens = num_tokens
        self.begun_s = begun_s
        self.ended_s = ended_s

    @property
    def token_s(self) -> float:
        return max(0.0, self.ended_s - self.begun_s) / max(1, self.num_tokens)


class _Line:
    """Straight pieces through measured points, of prompt lengths and milliseconds."""

    def __init__(self, points: dict[int, float]) -> None:
        self._lengths = sorted(points)
        self._ms = [points[length] for length in self._lengths]

    def seconds(self, num_tokens: int) -> float:
        right = min(max(1, bisect_left(self._lengths, num_tokens)), len(self._lengths) - 1)
        x0, x1 = self._lengths[right - 1], self._lengths[right]
        y0, y1 = self._ms[right - 1], self._ms[right]
        return (y0 + (y1 - y0) * (num_tokens - x0) / (x1 - x0)) / 1000


def _never_falling(points: dict[int, float]) -> dict[int, float]:
    """A length that was only measured alone costs no more than a longer one that was packed."""
    lengths = sorted(points, reverse=True)
    return dict(zip(lengths, accumulate((points[n] for n in lengths), min), strict=True))


def _weighed_median(pairs: Iterable[tuple[float, int]]) -> float:
    """The value in the middle of all weight."""
    ordered = sorted(pairs)
    half = sum(weight for _, weight in ordered) / 2
    for value, weight in ordered:
        half -= weight
        if half <= 0:
            return value
    return ordered[-1][0]
