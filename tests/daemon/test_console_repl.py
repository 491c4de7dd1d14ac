"""The console's prompt through a pseudo-terminal, before a node that is played."""

import asyncio
import os
import re
import signal
import stat
import sys
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path

import pexpect
import pytest

from daemon.admin_commands import Drain, GetRequests, GetSlo, Restart
from daemon.admin_door import LocalDoor
from daemon.admin_protocol import RequestsAre, SloIs
from daemon.slo import Targets
from tests.daemon.console_house import House

PATIENCE_S = 60
READY = r"smollm2\[ready\]>"
_BETWEEN = r"(?:\x1b\[[0-9;?]*[a-zA-Z])*"  # escape sequences
TAB, CTRL_C, CTRL_D = "\t", "\x03", "\x04"


class Terminal:
    """A console that runs in one; waiting for its words leaves the loop to the house."""

    def __init__(self, house: House, *argv: str) -> None:
        environment = os.environ | {
            "XDG_STATE_HOME": str(house.run_dir / "state"),
            "PROMPT_TOOLKIT_NO_CPR": "1",
            "TERM": "xterm",
            "NO_COLOR": "1",
        }
        command = ["-P", "-m", "daemon", "console", "--run-dir", str(house.run_dir), *argv]
        self._child = pexpect.spawn(
            sys.executable, command, env=environment, encoding="utf-8", timeout=PATIENCE_S,
            dimensions=(40, 120),
            # A test run in the background ignores Ctrl-C, and so would its children.
            preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
        )  # fmt: skip

    async def sees(self, pattern: str) -> None:
        await self._aside(lambda: self._child.expect(pattern))

    async def shows(self, text: str) -> None:
        """The same of text that is drawn piece by piece."""
        await self.sees(_BETWEEN.join(map(re.escape, text)))

    def types(self, text: str) -> None:
        self._child.send(text)

    async def does(self, line: str, pattern: str) -> None:
        """Enter a line, see that, and the prompt again."""
        self.types(f"{line}\r")
        await self.sees(pattern)
        await self.sees(r"\]>")

    async def ends(self) -> int | None:
        await self._aside(lambda: self._child.expect(pexpect.EOF))
        await self._aside(self._child.wait)
        status: int | None = self._child.exitstatus
        return status

    async def _aside(self, wait: Callable[[], object]) -> None:
        await asyncio.get_running_loop().run_in_executor(None, wait)

    def close(self) -> None:
        self._child.close(force=True)


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    opened = House(tmp_path)
    yield opened
    await opened.close()


@pytest.fixture
async def terminal(house: House) -> AsyncIterator[Terminal]:
    opened = Terminal(house)
    await opened.sees(READY)
    yield opened
    opened.close()


async def test_the_prompt_runs_commands_helps_and_guesses(terminal: Terminal) -> None:
    await terminal.does("status", "1 d 1:01:01")
    await terminal.does("statsu", "there is no 'statsu'; did you mean status")
    await terminal.does("help", "COMMAND")
    await terminal.does("? restart", "usage: distserve console restart")
    terminal.types("quit\r")
    assert await terminal.ends() == 0


async def test_verbs_options_and_live_names_are_completed(house: House, terminal: Terminal) -> None:
    terminal.types(f"rest{TAB}")
    await terminal.shows("restart")
    terminal.types(f" d{TAB}")
    await terminal.shows("d0")
    terminal.types(f" --dead{TAB}")
    await terminal.shows("--deadline")
    await terminal.does(" 3 --yes", "it is done")
    assert house.operator.orders == [Restart("d0", 3.0)]
    terminal.types(CTRL_D)
    assert await terminal.ends() == 0


async def test_an_order_is_asked_for_and_a_no_leaves_all_as_it_is(
    house: House, terminal: Terminal
) -> None:
    terminal.types("drain\r")
    await terminal.sees(r"the node would take nothing new\r\ngo on\? \[y/N\]")
    await terminal.does("n", "nothing was done")
    assert house.operator.orders == []
    house.operator.drained.set()
    terminal.types("drain\r")
    await terminal.sees(r"go on\? \[y/N\]")
    terminal.types("y\r")
    await terminal.sees("it is done")
    await terminal.sees(r"smollm2\[draining\]>")
    assert house.operator.orders == [Drain(120.0)]


async def test_an_interrupt_ends_a_watch_and_not_the_prompt(terminal: Terminal) -> None:
    terminal.types("status --watch 0.1\r")
    for _ in range(2):
        await terminal.sees("1 d 1:01:01")
    terminal.types(CTRL_C)
    await terminal.sees(READY)
    terminal.types(f"nonsense{CTRL_C}")
    await terminal.sees(READY)
    await terminal.does("version --dry", "unrecognized arguments: --dry")


async def test_the_daemon_is_lost_and_found(house: House, terminal: Terminal) -> None:
    (serving,) = house.serving
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
    await terminal.sees("lost the daemon")
    await terminal.does("status", "is it running|went away")
    (house.run_dir / "admin.ipc").unlink(missing_ok=True)
    house.serve(LocalDoor(house.context, house.run_dir / "admin.ipc"))
    await terminal.sees("the daemon is back")
    await terminal.does("status", "1 d 1:01:01")


async def test_lines_are_remembered_for_their_owner_alone(house: House, terminal: Terminal) -> None:
    await terminal.does("workers", "81234")
    terminal.types(CTRL_D)
    assert await terminal.ends() == 0
    history = house.run_dir / "state" / "distserve" / "console_history"
    assert stat.S_IMODE(history.stat().st_mode) == 0o600
    assert "+workers" in history.read_text()
    again = Terminal(house)
    await again.sees(READY)
    again.types("\x1b[A")  # the arrow up
    await again.sees("workers")
    again.close()


async def test_top_has_a_screen_of_its_own_until_it_is_interrupted(
    house: House, terminal: Terminal
) -> None:
    house.operator.answers[GetSlo] = SloIs(Targets(ttft_s=0.2), ())
    house.operator.answers[GetRequests] = RequestsAre((), False, 7)
    terminal.types("top --every 0.1\r")
    await terminal.sees(r"\x1b\[\?1049h")
    for _ in range(2):  # it is drawn again and again
        await terminal.sees("1 d 1:01:01")
        await terminal.sees("goodput/s")
        await terminal.sees("0 shown, 7 under way")
    terminal.types(CTRL_C)
    await terminal.sees(READY)


async def test_without_a_daemon_there_is_no_prompt(house: House) -> None:
    terminal = Terminal(house, "--run-dir", str(house.run_dir / "nowhere"))
    assert await terminal.ends() == 3
    terminal.close()
