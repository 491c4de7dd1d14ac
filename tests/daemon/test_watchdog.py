"""Who is taken for wedged, and who is not. Beats of one second, a bound of ten."""

import pytest
from msgspec.structs import replace

from daemon.watchdog import Facts, Finding, Watchdog
from ipc.messages import Stats
from ipc.vocabulary import WorkerName

LEADER, FOLLOWER = WorkerName("decode-0"), WorkerName("decode-0", 1)
IDLE = Stats(blocks_total=8, blocks_free=8)
RUNNING = Stats(num_steps=7, num_running=1, blocks_total=8, blocks_free=6, blocks_in_use=2)
FULL = Stats(num_waiting=3, blocks_total=8, blocks_free=1, blocks_held=7)


class Watch:
    """One instance under a watchdog. Its workers answer all beats but where a test says no."""

    def __init__(self, *workers: WorkerName) -> None:
        self.watchdog = Watchdog(bound_s=10.0, beat_s=1.0)
        self.now_s = 1000.0
        self.answers = dict.fromkeys(workers or (LEADER,), 0)
        self.epoch = 1
        self.findings: list[Finding] = []

    def beats(
        self,
        count: int,
        stats: Stats = IDLE,
        *,
        silent: tuple[WorkerName, ...] = (),
        has_work: bool = False,
        blocks_to_go_on: int = 0,
        beat_s: float = 1.0,
    ) -> str | None:
        """So many beats; why it was wedged at the last of them, having not been before."""
        for _ in range(count):
            assert not self.findings or self.findings[-1].wedged is None, self.findings[-1]
            self.now_s += beat_s
            for name in self.answers.keys() - set(silent):
                self.answers[name] += 1
            answers = dict(self.answers)
            facts = Facts("decode-0", self.epoch, answers, has_work, stats, blocks_to_go_on)
            self.findings += self.watchdog.judge([facts], self.now_s)
        return self.findings[-1].wedged


def test_who_answers_is_not_wedged_however_long_it_idles() -> None:
    watch = Watch(LEADER, FOLLOWER)
    assert watch.beats(1000) is None
    assert watch.findings[-1].age_s == 0


def test_silence_for_the_bound_is_wedged_and_not_a_beat_earlier() -> None:
    watch = Watch()
    watch.beats(3)
    assert watch.beats(9, silent=(LEADER,)) is None
    assert watch.findings[-1].age_s == 9
    assert watch.beats(1, silent=(LEADER,)) == "decode-0/0.0 did not answer for 10 s"


def test_one_answer_in_time_grants_the_whole_bound_again() -> None:
    watch = Watch()
    watch.beats(9, silent=(LEADER,))
    watch.beats(1)
    assert watch.beats(9, silent=(LEADER,)) is None


def test_a_silent_follower_is_named_though_its_leader_answers() -> None:
    watch = Watch(LEADER, FOLLOWER)
    watch.beats(1)
    assert watch.beats(10, silent=(FOLLOWER,)) == "decode-0/1.0 did not answer for 10 s"


def test_an_announced_step_is_waited_for_and_then_the_bound() -> None:
    watch = Watch()
    watch.beats(1)
    busy = Stats(num_steps=7, busy_until_s=watch.now_s + 60, blocks_total=8, blocks_free=1)
    assert watch.beats(69, busy, silent=(LEADER,), has_work=True) is None
    assert watch.beats(1, busy, silent=(LEADER,), has_work=True) is not None


@pytest.mark.parametrize("away_s", [11.0, 30.0, 100_000.0])
def test_time_in_which_the_daemon_itself_was_stopped_counts_for_nobody(away_s: float) -> None:
    watch = Watch(LEADER, FOLLOWER)
    watch.beats(3, RUNNING, has_work=True)
    for _ in range(2):  # it goes on, and what has come meanwhile is not read yet
        assert watch.beats(1, RUNNING, silent=(LEADER, FOLLOWER), beat_s=away_s) is None
    assert watch.beats(6, RUNNING, silent=(LEADER, FOLLOWER), has_work=True) is None
    assert watch.beats(1, silent=(LEADER, FOLLOWER)) is not None


def test_a_daemon_that_is_always_late_finds_it_all_the_same() -> None:
    watch = Watch()
    watch.beats(1)
    assert watch.beats(7, silent=(LEADER,), beat_s=2.5) is not None


def test_work_without_a_step_is_wedged_though_it_answers() -> None:
    watch = Watch()
    watch.beats(1)
    watch.beats(1, RUNNING, has_work=True)
    assert watch.beats(9, RUNNING, has_work=True) is None
    assert watch.beats(1, RUNNING, has_work=True) == "it has work and took no step for 10 s"


def test_work_that_the_leader_knows_nothing_of_was_lost_on_the_way() -> None:
    watch = Watch()
    watch.beats(1)
    assert watch.beats(11, IDLE, has_work=True) == "it has work and took no step for 10 s"


def test_work_that_comes_after_a_long_rest_gets_the_whole_bound() -> None:
    watch = Watch()
    watch.beats(500)
    assert watch.beats(10, IDLE, has_work=True) is None


def test_steps_however_slow_are_progress() -> None:
    watch = Watch()
    for step in range(20):
        stats = Stats(num_steps=step, num_running=1, blocks_total=8, blocks_in_use=8)
        assert watch.beats(9, stats, has_work=True) is None


def test_a_full_prefill_pool_that_nobody_pulls_from_is_not_its_own_fault() -> None:
    watch = Watch()
    assert watch.beats(100, FULL, has_work=True, blocks_to_go_on=2) is None


NO_STEP = "it has work and took no step for 10 s"


def test_a_leader_that_answers_but_does_not_start_what_has_room_is_wedged() -> None:
    """Any block in use or held, and it once was thought to wait for room for ever."""
    watch = Watch()
    waiting = Stats(num_waiting=1, blocks_total=8, blocks_free=7, blocks_held=1)
    watch.beats(1, waiting)
    assert watch.beats(10, waiting, has_work=True, blocks_to_go_on=7) is None
    assert watch.beats(1, waiting, has_work=True, blocks_to_go_on=7) == NO_STEP


def test_a_leader_that_does_not_go_on_with_what_has_begun_is_wedged_though_its_pool_is_full() -> (
    None
):
    """Between two chunks: what has begun has all its blocks."""
    watch = Watch()
    begun = Stats(blocks_total=8, blocks_held=4, blocks_in_use=4)
    watch.beats(1, begun)
    assert watch.beats(11, begun, has_work=True, blocks_to_go_on=0) == NO_STEP


def test_a_leader_that_waits_for_blocks_that_no_reader_will_give_back_is_wedged() -> None:
    """They are in use by nothing that runs."""
    watch = Watch()
    lost = Stats(num_waiting=1, blocks_total=8, blocks_free=1, blocks_held=1, blocks_in_use=6)
    watch.beats(1, lost)
    assert watch.beats(11, lost, has_work=True, blocks_to_go_on=3) == NO_STEP


def test_the_end_of_a_wait_for_room_grants_the_whole_bound() -> None:
    watch = Watch()
    watch.beats(50, FULL, has_work=True, blocks_to_go_on=2)
    room = replace(FULL, blocks_free=2, blocks_held=6)
    assert watch.beats(10, room, has_work=True, blocks_to_go_on=2) is None
    assert watch.beats(1, room, has_work=True, blocks_to_go_on=2) == NO_STEP


@pytest.mark.parametrize("num_running", [0, 1])
def test_a_pull_that_never_ends_ends_its_instance_A22(num_running: int) -> None:
    """Though others there go on, and though new pulls have ended since."""
    watch = Watch()
    stuck = Stats(num_waiting=1, num_running=num_running, pull_since_s=5.0)
    verdicts = [
        watch.beats(1, replace(stuck, num_steps=n, num_pulls=n), has_work=True) for n in range(11)
    ]
    assert verdicts == [None] * 10 + ["a pull did not end within 10 s"]


def test_pull_after_pull_is_progress() -> None:
    watch = Watch()
    for since_s in range(100):
        pulling = Stats(num_waiting=1, num_pulls=since_s, pull_since_s=float(since_s))
        assert watch.beats(1, pulling, has_work=True) is None


def test_a_new_life_owes_nothing_of_the_last_one() -> None:
    watch = Watch()
    watch.beats(9, silent=(LEADER,))
    watch.epoch = 2
    assert watch.beats(9, silent=(LEADER,)) is None
