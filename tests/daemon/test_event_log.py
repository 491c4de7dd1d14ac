"""The ring of events, and how what is seen of instances becomes events."""

import asyncio
from collections import Counter

import msgspec
import pytest

from daemon.admin_views import EventKind
from daemon.event_feed import EventFeed, Glance, changes
from daemon.event_log import EventLog
from ipc.messages import Stats
from tests.daemon.stage import MakeStage

UP = Glance(7, True, 0, None, None, False)
DOWN = Glance(None, False, 0, None, None, False)


def filled(num_events: int, kept: int = 1024) -> EventLog:
    log = EventLog(kept, clock=lambda: 5.0)
    for number in range(num_events):
        log.note(EventKind.STARTED, f"d{number}")
    return log


def test_a_follower_gets_what_came_since_it_asked_last() -> None:
    log = filled(3)
    page = log.after(1, limit=10)
    assert [(e.number, e.subject) for e in page.events] == [(2, "d1"), (3, "d2")]
    assert (page.next_after, page.num_lost) == (3, 0)
    assert log.after(3, limit=10).events == []


def test_who_asks_first_gets_the_newest_and_pages_are_bounded() -> None:
    log = filled(30)
    assert [e.number for e in log.after(None, limit=4).events] == [27, 28, 29, 30]
    page = log.after(0, limit=4)
    assert [e.number for e in page.events] == [1, 2, 3, 4]
    assert [e.number for e in log.after(page.next_after, limit=4).events] == [5, 6, 7, 8]


def test_a_slow_follower_sees_how_many_events_it_missed_C21() -> None:
    log = filled(100, kept=10)
    page = log.after(50, limit=200)
    assert (page.num_lost, [e.number for e in page.events]) == (40, list(range(91, 101)))
    assert page.next_after == 100


def test_a_number_of_an_earlier_daemon_starts_over() -> None:
    assert [e.number for e in filled(2).after(900, limit=10).events] == [1, 2]


def test_an_empty_log_has_nothing_to_tell() -> None:
    page = EventLog().after(None, limit=10)
    assert (page.events, page.next_after, page.num_lost) == ([], 0, 0)


def test_long_texts_are_cut() -> None:
    log = EventLog()
    log.note(EventKind.DIED, "d0", "x" * 10_000)
    (event,) = log.after(None, limit=1).events
    assert len(event.text) == 300


async def test_a_follower_that_waits_is_woken_by_the_next_event() -> None:
    log = filled(1)
    waiting = asyncio.ensure_future(log.newer_than(1))
    await asyncio.sleep(0)
    assert not waiting.done()
    log.note(EventKind.READY, "d0")
    await asyncio.wait_for(waiting, 5)
    await asyncio.wait_for(log.newer_than(1), 5)  # it is there already
    gone = asyncio.ensure_future(log.newer_than(2))
    await asyncio.sleep(0)
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    log.note(EventKind.READY, "d1")


@pytest.mark.parametrize(
    ("before", "now", "kinds"),
    [
        (DOWN, {"epoch": 8}, ["started"]),
        (DOWN, {"epoch": 8, "is_ready": True}, ["started", "ready"]),
        (UP, {}, []),
        (UP, {"is_ready": False}, []),
        (UP, {"epoch": None, "is_ready": False, "deaths": 1, "last_exit": "exit code 1"}, ["died"]),
        (UP, {"epoch": 9, "is_ready": False, "deaths": 1, "last_exit": "x"}, ["died", "started"]),
        (UP, {"deaths": 1, "last_exit": "wedged: no step for 10 s"}, ["wedged"]),
        (UP, {"epoch": None, "is_ready": False, "is_wanted_gone": True}, ["stopped"]),
        (
            UP,
            {"epoch": None, "is_ready": False, "deaths": 1, "quarantined": "x"},
            ["died", "quarantined"],
        ),
        (UP, {"epoch": 9}, ["started", "ready"]),
    ],
)
def test_two_looks_at_an_instance_tell_what_happened_in_between(
    before: Glance, now: dict[str, object], kinds: list[str]
) -> None:
    found = changes(before, msgspec.structs.replace(before, **now))
    assert [kind.value for kind, _ in found] == kinds


async def test_lives_and_deaths_of_real_wards_are_told_in_order(make_stage: MakeStage) -> None:
    stage = await make_stage()
    log = EventLog()
    feed = EventFeed(log, stage.supervisor.wards, stage.controller.instances, {})
    keeping = stage.keep()
    changed = asyncio.Event()

    def look() -> None:
        feed.look()
        changed.set()

    async def until_ready() -> None:
        while not stage.ward.is_ready:
            changed.clear()
            await changed.wait()

    stage.supervisor.on_change = look
    first = await stage.started.get()
    stage.say_ready(first)
    await until_ready()
    first.end("exit code 1")
    second = await stage.started.get()
    stage.say_ready(second)
    await until_ready()
    told = [(e.kind.value, e.text) for e in log.after(0, limit=50).events]
    assert told == [
        ("started", ""),
        ("ready", "it can serve"),
        ("died", "exit code 1"),
        ("started", "again"),
        ("ready", "it can serve"),
    ]
    second.kill()
    await stage.supervisor.stop()
    await keeping


async def test_floods_are_summed_up(make_stage: MakeStage) -> None:
    stage = await make_stage()
    log = EventLog()
    refused: Counter[str] = Counter()
    feed = EventFeed(log, stage.supervisor.wards, stage.controller.instances, refused)
    refused.update({"queue_full": 1000, "draining": 1})
    feed.sum_up()
    feed.sum_up()
    refused["draining"] += 4
    feed.sum_up()
    assert [(e.subject, e.text) for e in log.after(0, limit=50).events] == [
        ("1001 requests", "1000 queue_full, 1 draining"),
        ("4 requests", "4 draining"),
    ]


async def test_faults_of_an_audit_are_told_when_there_are_more(make_stage: MakeStage) -> None:
    stage = await make_stage()
    log = EventLog()
    feed = EventFeed(log, stage.supervisor.wards, stage.controller.instances, {})
    keeping = stage.keep()
    process = await stage.ready()
    for faults in (0, 2, 2, 3):
        stage.controller.on_event("mixed-0", process.config.epoch, Stats(audit_failures=faults))
        feed.sum_up()
    told = [(e.kind.value, e.text) for e in log.after(0, limit=50).events]
    assert told == [
        ("audit_failed", "2 faults in the block books, see the log"),
        ("audit_failed", "1 faults in the block books, see the log"),
    ]
    process.kill()
    await stage.supervisor.stop()
    await keeping
