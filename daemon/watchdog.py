"""Decide which instances are wedged: alive as processes, but no longer getting anywhere.

Pure: facts in at every beat, findings out, the clock passed in. What counts is not the clock on
the wall but the time that the daemon itself was awake: one that was stopped, or too busy to read
what had come, knows nothing of the workers' silence meanwhile.
"""

from collections.abc import Hashable, Iterable

import msgspec

from ipc.messages import Stats
from ipc.vocabulary import WorkerName

LATE = 1.5  # beats: what a beat comes later than that, the daemon was not awake


class Facts(msgspec.Struct, frozen=True):
    """One life of an instance at a beat.

    `answers` has the newest beat that each of its workers has answered; `has_work` says whether
    the daemon has given it something that has not come back; `stats` is its leader's last word.
    With fewer free blocks than `blocks_to_go_on`, none of its prompts can be computed now.
    """

    instance: str
    epoch: int
    answers: dict[WorkerName, int]
    has_work: bool
    stats: Stats
    blocks_to_go_on: int = 0

    @property
    def is_runnable(self) -> bool:
        """It has work, and does not just wait for blocks that it holds for others: as long as
        they are not pulled, that is no fault of its own."""
        lacking = self.blocks_to_go_on - self.stats.blocks_free
        waits_for_readers = self.stats.num_running == 0 and 0 < lacking <= self.stats.blocks_held
        return self.has_work and not waits_for_readers

    @property
    def progress(self) -> tuple[int, int, float]:
        stats = self.stats
        return (stats.num_steps, stats.num_pulls, stats.last_step_s)


class Finding(msgspec.Struct, frozen=True):
    """How long ago an instance last got on; the reason, if it is wedged. One that is within a
    step that was to be long is excused."""

    instance: str
    epoch: int
    age_s: float
    wedged: str | None = None
    is_excused: bool = False


class Watchdog:
    """Remembers since when nothing has changed.

    Args:
        bound_s: how long an instance may get nowhere, beyond what it has announced.
        beat_s: `judge` is called so often.
    """

    def __init__(self, bound_s: float, beat_s: float) -> None:
        self._bound_s = bound_s
        self._longest_beat_s = LATE * beat_s
        self._last_s: float | None = None
        self._awake_s = 0.0
        self._known: dict[Hashable, tuple[object, float]] = {}
        self._seen: dict[Hashable, tuple[object, float]] = {}

    def judge(self, lives: Iterable[Facts], now_s: float) -> list[Finding]:
        """One finding for each life; lives that are not given any more are forgotten."""
        if self._last_s is not None:
            self._awake_s += min(now_s - self._last_s, self._longest_beat_s)
        self._last_s = now_s
        self._known, self._seen = self._seen, {}
        return [self._examine(facts, now_s) for facts in lives]

    def _examine(self, facts: Facts, now_s: float) -> Finding:
        silence_s = {
            name: self._unchanged_s((facts.epoch, name), beat)
            for name, beat in facts.answers.items()
        }
        is_runnable, pull_since_s = facts.is_runnable, facts.stats.pull_since_s
        stall_s = self._unchanged_s((facts.epoch, "step"), (is_runnable, facts.progress))
        pull_s = self._unchanged_s((facts.epoch, "pull"), pull_since_s)
        silent = [str(name) for name, age_s in silence_s.items() if age_s >= self._bound_s]
        wedged = None
        is_excused = self._is_excused(facts.stats, now_s)
        if is_excused:
            pass
        elif silent:
            wedged = f"{', '.join(silent)} did not answer for {self._bound_s:g} s"
        elif is_runnable and stall_s >= self._bound_s:
            wedged = f"it has work and took no step for {self._bound_s:g} s"
        elif pull_since_s is not None and pull_s >= self._bound_s:
            wedged = f"a pull did not end within {self._bound_s:g} s"
        age_s = max(*silence_s.values(), stall_s if is_runnable else 0.0)
        return Finding(facts.instance, facts.epoch, age_s, wedged, is_excused)

    def _is_excused(self, stats: Stats, now_s: float) -> bool:
        """It is within a long step that was announced, or not long after."""
        return stats.busy_until_s is not None and now_s < stats.busy_until_s + self._bound_s

    def _unchanged_s(self, what: Hashable, value: object) -> float:
        """For how long a value has been the same, of the time that we were awake."""
        before, since_s = self._known.get(what, (None, self._awake_s))
        if before != value:
            since_s = self._awake_s
        self._seen[what] = (value, since_s)
        return self._awake_s - since_s
