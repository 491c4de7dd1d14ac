"""How well the targets are met, over the last minutes: attainment, goodput, percentiles.

Pure: told of each ended request with its time, asked for a window. Kept in slots of a few seconds,
latencies in buckets of equal ratio, so that it costs the same at any load and never grows.
"""

import math
from collections import Counter, deque
from collections.abc import Iterable

import msgspec

SLOT_S = 5.0
MAX_WINDOW_S = 3600.0
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


class _Slot:
    """What ended within one slot."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.verdicts: Counter[Verdict] = Counter()
        self.ttft: Counter[int] = Counter()
        self.tpot: Counter[int] = Counter()


class SloBook:
    """Answered requests of the last hour."""

    def __init__(self, targets: Targets) -> None:
        self.targets = targets
        self._slots: deque[_Slot] = deque(maxlen=math.ceil(MAX_WINDOW_S / SLOT_S))

    def judge(self, ttft_s: float, tpot_s: float | None) -> Verdict:
        targets = self.targets
        return Verdict(
            ttft=targets.ttft_s is None or ttft_s <= targets.ttft_s,
            tpot=targets.tpot_s is None or tpot_s is None or tpot_s <= targets.tpot_s,
        )

    def answered(self, now_s: float, ttft_s: float, tpot_s: float | None) -> Verdict:
        """A request has ended with its answer; `tpot_s` is None when it had one token."""
        number = int(now_s // SLOT_S)
        if not self._slots or self._slots[-1].number != number:
            self._slots.append(_Slot(number))
        slot, verdict = self._slots[-1], self.judge(ttft_s, tpot_s)
        slot.verdicts[verdict] += 1
        slot.ttft[_bucket(ttft_s)] += 1
        if tpot_s is not None:
            slot.tpot[_bucket(tpot_s)] += 1
        return verdict

    def report(self, now_s: float, window_s: float) -> WindowReport:
        """The last `window_s` seconds, in whole slots, the present one included. `now_s` may be
        in the past."""
        first, last = int((now_s - window_s) // SLOT_S) + 1, int(now_s // SLOT_S)
        return self._sum((s for s in self._slots if first <= s.number <= last), window_s)

    def _sum(self, slots: Iterable[_Slot], window_s: float) -> WindowReport:
        verdicts: Counter[Verdict] = Counter()
        ttft: Counter[int] = Counter()
        tpot: Counter[int] = Counter()
        for slot in slots:
            verdicts.update(slot.verdicts)
            ttft.update(slot.ttft)
            tpot.update(slot.tpot)
        return WindowReport(
            window_s=window_s,
            num_requests=verdicts.total(),
            num_met_ttft=sum(count for verdict, count in verdicts.items() if verdict.ttft),
            num_met_tpot=sum(count for verdict, count in verdicts.items() if verdict.tpot),
            num_met_both=sum(count for verdict, count in verdicts.items() if verdict.both),
            ttft=_latency(ttft),
            tpot=_latency(tpot),
        )


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
