"""How well the targets are met, over the last minutes: attainment, goodput, percentiles.

Pure: told of each ended request with its time, asked for a window. Kept in slots of a few seconds,
latencies in buckets of equal ratio, so that it costs the same at any load and never grows.
"""

import math
from collections import Counter, deque

import msgspec

SLOT_S = 5.0
MAX_WINDOW_S = 3600.0
WINDOWS_S = (60.0, 300.0, MAX_WINDOW_S)
_RATIO = 1.05  # of neighbouring bucket edges: a percentile is at most so much too high
_LOG_RATIO = math.log(_RATIO)
_LEAST_S = 1e-4


class Targets(msgspec.Struct, frozen=True):
    """The SLO: what the first token and each further one may take; None: any time will do."""

    ttft_s: float | None = None
    tpot_s: float | None = None


class Latency(msgspec.Struct, frozen=True):
    """What a window's requests took, seconds; None when there were none."""

    p50_s: float | None
    p90_s: float | None
    p99_s: float | None


class WindowReport(msgspec.Struct, frozen=True, kw_only=True):
    """One window. `attainment` is the share of answered requests that met both targets; goodput
    counts those per second. A request of one token meets any TPOT."""

    window_s: float
    num_requests: int
    num_met_ttft: int
    num_met_tpot: int
    num_met_both: int
    ttft: Latency
    tpot: Latency

    @property
    def attainment(self) -> float | None:
        return self.num_met_both / self.num_requests if self.num_requests else None

    @property
    def goodput_per_s(self) -> float:
        return self.num_met_both / self.window_s


class Verdict(msgspec.Struct, frozen=True):
    """Which targets one request met."""

    ttft: bool
    tpot: bool

    @property
    def both(self) -> bool:
        return self.ttft and self.tpot


class _Sum:
    """Verdicts and latencies of some requests, the latter by bucket."""

    def __init__(self) -> None:
        self.verdicts: Counter[Verdict] = Counter()
        self.ttft: Counter[int] = Counter()
        self.tpot: Counter[int] = Counter()

    def count(self, verdict: Verdict, ttft_bucket: int, tpot_bucket: int | None) -> None:
        self.verdicts[verdict] += 1
        self.ttft[ttft_bucket] += 1
        if tpot_bucket is not None:
            self.tpot[tpot_bucket] += 1

    def add(self, other: "_Sum") -> None:
        self.verdicts.update(other.verdicts)
        self.ttft.update(other.ttft)
        self.tpot.update(other.tpot)

    def take_away(self, other: "_Sum") -> None:
        """What was added before; buckets that nobody is in any more are dropped."""
        self.verdicts -= other.verdicts
        self.ttft -= other.ttft
        self.tpot -= other.tpot

    def report(self, window_s: float) -> WindowReport:
        verdicts = self.verdicts
        return WindowReport(
            window_s=window_s,
            num_requests=verdicts.total(),
            num_met_ttft=sum(count for verdict, count in verdicts.items() if verdict.ttft),
            num_met_tpot=sum(count for verdict, count in verdicts.items() if verdict.tpot),
            num_met_both=sum(count for verdict, count in verdicts.items() if verdict.both),
            ttft=_latency(self.ttft),
            tpot=_latency(self.tpot),
        )


class _Sliding:
    """The sum of the last slots, kept up as they come and go."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._within: deque[tuple[int, _Sum]] = deque()
        self.sum = _Sum()
        self.last = -1  # slot up to which it is kept

    def begin(self, number: int, slot: _Sum) -> None:
        self._within.append((number, slot))
        self.move_to(number)

    def move_to(self, number: int) -> None:
        self.last = max(self.last, number)
        while self._within and self._within[0][0] <= self.last - self._num_slots:
            self.sum.take_away(self._within.popleft()[1])


class SloBook:
    """Answered requests of the last hour. Windows of `WINDOWS_S` cost the same at any length."""

    def __init__(self, targets: Targets) -> None:
        self.targets = targets
        self._slots: dict[int, _Sum] = {}
        self._sliding = {window_s: _Sliding(round(window_s / SLOT_S)) for window_s in WINDOWS_S}

    def judge(self, ttft_s: float, tpot_s: float | None) -> Verdict:
        targets = self.targets
        return Verdict(
            ttft=targets.ttft_s is None or ttft_s <= targets.ttft_s,
            tpot=targets.tpot_s is None or tpot_s is None or tpot_s <= targets.tpot_s,
        )

    def answered(self, now_s: float, ttft_s: float, tpot_s: float | None) -> Verdict:
        """A request has ended with its answer; `tpot_s` is None when it had one token."""
        verdict = self.judge(ttft_s, tpot_s)
        what = (verdict, _bucket(ttft_s), None if tpot_s is None else _bucket(tpot_s))
        self._slot(int(now_s // SLOT_S)).count(*what)
        for sliding in self._sliding.values():
            sliding.sum.count(*what)
        return verdict

    def report(self, now_s: float, window_s: float) -> WindowReport:
        """The last `window_s` seconds, in whole slots, the present one included. `now_s` may be
        in the past."""
        last = int(now_s // SLOT_S)
        sliding = self._sliding.get(window_s)
        if sliding is not None and last >= sliding.last:
            sliding.move_to(last)
            return sliding.sum.report(window_s)
        found = _Sum()
        for number in range(int((now_s - window_s) // SLOT_S) + 1, last + 1):
            if (slot := self._slots.get(number)) is not None:
                found.add(slot)
        return found.report(window_s)

    def _slot(self, number: int) -> _Sum:
        """The present one; the oldest is forgotten for a new one."""
        if number not in self._slots:
            slot = self._slots[number] = _Sum()
            for sliding in self._sliding.values():
                sliding.begin(number, slot)
            if len(self._slots) > MAX_WINDOW_S / SLOT_S:
                del self._slots[next(iter(self._slots))]
        return self._slots[number]


def _bucket(seconds: float) -> int:
    return math.ceil(math.log(max(seconds, _LEAST_S) / _LEAST_S) / _LOG_RATIO)


def _latency(buckets: Counter[int]) -> Latency:
    return Latency(*(_percentile(buckets, share) for share in (0.5, 0.9, 0.99)))


def _percentile(buckets: Counter[int], share: float) -> float | None:
    """The upper edge of the bucket that the share falls into."""
    wanted = math.ceil(share * buckets.total())
    for bucket in sorted(buckets):
        wanted -= buckets[bucket]
        if wanted <= 0:
            return _LEAST_S * math.exp(bucket * _LOG_RATIO)
    return None
