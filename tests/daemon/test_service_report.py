"""What the service manager hears while the daemon starts, serves, reloads and ends."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from daemon.admin_views import NodeState
from daemon.pulse import Pulse
from daemon.sd_notify import Notifier
from daemon.service_report import ServiceReport, status_line
from tests.daemon.fake_manager import FakeManager


class Rig:
    """A report whose status the test writes and whose part the test holds."""

    def __init__(
        self, path: Path, watchdog_s: float | None = None, status_every_s: float = 0.05
    ) -> None:
        self.manager = FakeManager(str(path / "notify"))
        self.text = "starting"
        self.rounds = 0
        self.does_turn = True
        self.looks: asyncio.Queue[int] = asyncio.Queue()
        self.notifier = Notifier(self.manager.address, watchdog_s)
        self.report = ServiceReport(
            self.notifier,
            lambda: self.text,
            Pulse({"part": self._count}, max_still_s=0.0),
            beat_s=0.01,
            status_every_s=status_every_s,
        )

    def _count(self) -> int:
        self.rounds += self.does_turn
        self.looks.put_nowait(self.rounds)
        return self.rounds

    async def until(self, holds: Callable[[list[str]], bool]) -> list[str]:
        while not holds(lines := await self.manager.next()):
            pass
        return lines


@asynccontextmanager
async def running(rig: Rig) -> AsyncIterator[None]:
    task = asyncio.ensure_future(rig.report.run())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        rig.manager.socket.close()
        rig.notifier.close()


EXTENSION = ["EXTEND_TIMEOUT_USEC=30000"]  # three beats


async def test_a_start_that_takes_long_asks_for_time_again_and_again(tmp_path: Path) -> None:
    rig = Rig(tmp_path, watchdog_s=0.03)
    async with running(rig):
        for _ in range(3):
            assert await rig.manager.next() == EXTENSION


async def test_ready_is_said_once_and_from_then_on_the_watchdog_is_told(tmp_path: Path) -> None:
    rig = Rig(tmp_path, watchdog_s=0.03)
    async with running(rig):
        rig.text = "ready: 0 requests under way"
        rig.report.ready()
        rig.report.ready()
        ready = ["READY=1", f"STATUS={rig.text}"]
        assert await rig.manager.next() == ready
        for _ in range(3):
            assert await rig.manager.next() == ["WATCHDOG=1"]


async def test_without_progress_the_watchdog_hears_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rig = Rig(tmp_path, watchdog_s=0.03)
    async with running(rig):
        rig.report.ready()
        await rig.until(lambda lines: lines == ["WATCHDOG=1"])
        rig.does_turn = False
        while await rig.looks.get() != rig.rounds or not rig.looks.empty():
            pass
        await rig.looks.get()  # from here on nothing has moved between two looks
        rig.manager.received()
        for _ in range(3):
            await rig.looks.get()
        assert rig.manager.received() == []
    assert "the watchdog is not told that all is well: no progress of part" in caplog.text


async def test_a_status_goes_out_when_it_changes_and_the_last_one_is_never_lost(
    tmp_path: Path,
) -> None:
    rig = Rig(tmp_path)
    async with running(rig):
        rig.report.ready()
        for count in range(1000):
            rig.text = f"ready: {count} requests under way"
            rig.report.changed()
            if count % 100 == 0:
                await asyncio.sleep(0)
        statuses = []
        while "STATUS=ready: 999 requests under way" not in statuses:
            statuses += [line for line in await rig.manager.next() if "STATUS" in line]
        assert len(statuses) < 5


async def test_what_has_not_changed_is_not_said_again(tmp_path: Path) -> None:
    rig = Rig(tmp_path, status_every_s=0.0)
    rig.text = "same"
    async with running(rig):
        rig.report.ready()
        for _ in range(3):
            rig.report.changed()
            await rig.looks.get()
        rig.text = "other"
        rig.report.changed()
        heard = [await rig.manager.next() for _ in range(2)]
        while ["STATUS=other"] not in heard:
            heard.append(await rig.manager.next())
        assert heard.count(["STATUS=same"]) == 1


async def test_a_reload_is_framed_by_reloading_and_ready(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    async with running(rig):
        rig.report.ready()
        rig.manager.received()
        with rig.report.reloading():
            rig.text = "ready: 2 requests under way"
        assert (await rig.manager.next())[0] == "RELOADING=1"
        assert await rig.manager.next() == ["READY=1", "STATUS=ready: 2 requests under way"]


@pytest.mark.parametrize("is_stopping", [False, True])
async def test_a_reload_never_makes_ready_what_is_not(tmp_path: Path, is_stopping: bool) -> None:
    rig = Rig(tmp_path)
    async with running(rig):
        if is_stopping:
            rig.report.ready()
            rig.report.stopping()
            rig.manager.received()
        with rig.report.reloading():
            pass
        assert [lines for lines in rig.manager.received() if "READY=1" in lines] == []


async def test_a_drain_says_so_and_asks_for_time_until_it_is_over_C20(tmp_path: Path) -> None:
    rig = Rig(tmp_path, watchdog_s=0.03)
    async with running(rig):
        rig.report.ready()
        rig.manager.received()
        rig.text = "draining: 1 request under way"
        rig.report.stopping()
        assert await rig.manager.next() == ["STOPPING=1", "STATUS=draining: 1 request under way"]
        for _ in range(4):
            assert await rig.manager.next() == EXTENSION


async def test_where_no_manager_listens_nothing_runs() -> None:
    report = ServiceReport(Notifier(None), lambda: "", Pulse({}))
    report.changed()
    await report.run()


def test_a_status_line_says_what_is_missing_while_something_is() -> None:
    progress = "prefill-0 ready, decode-0 loading 61%"
    assert status_line(NodeState.STARTING, 0, progress) == f"starting: {progress}"
    assert status_line(NodeState.READY, 3, progress) == "ready: 3 requests under way"
    degraded = status_line(NodeState.DEGRADED, 1, progress)
    assert degraded == f"degraded: 1 request under way; {progress}"
