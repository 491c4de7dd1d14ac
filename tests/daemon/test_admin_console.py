"""The console against a real daemon-side socket: right users, wrong bytes, stuck readers."""

import asyncio
import json
import os
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import zmq
import zmq.asyncio

from daemon import admin_protocol, console
from daemon.admin_console import MAX_PENDING_DRAINS, AdminConsole, RefusedByState
from daemon.admin_protocol import (
    BlockCounts,
    Drain,
    GetStatus,
    InstanceStatus,
    NodeState,
    Request,
    Status,
    WorkerStatus,
)
from ipc.vocabulary import Role


def status_of(state: NodeState, model: str = "smollm2") -> Status:
    return Status(
        state=state,
        model=model,
        version="0.1.0",
        pid=77,
        uptime_s=90_061.5,
        requests={"queued": 0, "prefill": 1, "decode": 12},
        instances=(
            InstanceStatus(
                name="p0",
                role=Role.PREFILL,
                state="ready",
                pid=78,
                epoch=2**63,
                restarts=1,
                last_exit="signal 9",
                queue_tokens=512,
                blocks=BlockCounts(total=100, free=60, held=30, in_use=10),
                kernels="[bold]cpu",
            ),
            InstanceStatus(
                name="d0",
                role=Role.DECODE,
                state="ready",
                tp=2,
                workers=(WorkerStatus(0, 0, 4, 81_234), WorkerStatus(0, 1, 5, 81_235)),
            ),
        ),
    )


class FakeOperator:
    """A node whose drain ends when a test says so."""

    def __init__(self) -> None:
        self.state = NodeState.READY
        self.model = "smollm2"
        self.drained = asyncio.Event()
        self.deadlines: list[float] = []
        self.bug: Exception | None = None

    def status(self) -> Status:
        if self.bug is not None:
            raise self.bug
        return status_of(self.state, self.model)

    async def drain(self, deadline_s: float) -> None:
        self.state = NodeState.DRAINING
        self.deadlines.append(deadline_s)
        async with asyncio.timeout(deadline_s):
            await self.drained.wait()

    def undrain(self) -> None:
        if self.state is not NodeState.DRAINING:
            raise RefusedByState("the node is not draining")
        self.state = NodeState.READY


class House:
    """A served admin socket, and consoles that run in threads as they do in a terminal."""

    def __init__(self, run_dir: Path, operator: FakeOperator, context: zmq.asyncio.Context) -> None:
        self.run_dir = run_dir
        self.operator = operator
        self.context = context
        self.threads = ThreadPoolExecutor(max_workers=2)
        self.dealers: list[zmq.asyncio.Socket] = []

    async def run(self, *argv: str, wait: Callable[[float], None] | None = None) -> int:
        arguments = [*argv, "--run-dir", str(self.run_dir)]
        run = console.main if wait is None else lambda argv: console.main(argv, wait)
        return await asyncio.get_running_loop().run_in_executor(self.threads, run, arguments)

    def dealer(self, name: str = "admin.ipc", *, room: int = 1000) -> zmq.asyncio.Socket:
        """A console that a test drives by hand; `room` is how many answers it takes unread."""
        socket: zmq.asyncio.Socket = self.context.socket(zmq.DEALER)
        self.dealers.append(socket)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, room)
        socket.connect(f"ipc://{self.run_dir / name}")
        return socket

    def close(self) -> None:
        for socket in self.dealers:
            socket.close()
        self.threads.shutdown()
        self.context.destroy(linger=0)


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    context = zmq.asyncio.Context()
    operator = FakeOperator()
    served = AdminConsole(context, tmp_path / "admin.ipc", operator)
    task = asyncio.create_task(served.serve())
    opened = House(tmp_path, operator, context)
    yield opened
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    opened.close()


async def ask(socket: zmq.asyncio.Socket, *frames: bytes) -> dict[str, Any]:
    await socket.send_multipart(frames)
    reply: dict[str, Any] = json.loads(await socket.recv())
    return reply


def status_request(call_id: int = 1) -> bytes:
    return admin_protocol.encode(Request(admin_protocol.ADMIN_VERSION, call_id, GetStatus()))


async def until(happened: Callable[[], bool], wake: Callable[[], Awaitable[object]]) -> None:
    """Exchange messages until something has happened on the other side."""
    while not happened():
        await wake()


async def test_status_as_json_holds_every_field(
    house: House, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await house.run("status", "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["v"], shown["ok"], shown["state"]) == (1, True, "ready")
    assert shown["requests"] == {"queued": 0, "prefill": 1, "decode": 12}
    assert shown["instances"][0]["epoch"] == 2**63
    assert shown["instances"][0]["blocks"] == {"total": 100, "free": 60, "held": 30, "in_use": 10}


async def test_status_as_tables_fits_a_terminal_and_reads_no_markup(
    house: House, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await house.run("status") == 0
    shown = capsys.readouterr().out
    for part in ("ready", "smollm2", "1 d 1:01:01", "1 prefill, 12 decode", "signal 9"):
        assert part in shown
    assert "[bold]cpu" in shown
    assert "10/30/100" in shown
    assert re.search(r"\nd0 +2 +1 +0 +1 +5 +81235 *\n", shown), "its second worker"
    assert max(map(len, shown.splitlines())) <= 80


async def test_watch_asks_again_until_interrupted(
    house: House, capsys: pytest.CaptureFixture[str]
) -> None:
    waits: list[float] = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            raise KeyboardInterrupt

    assert await house.run("status", "--watch", "0.5", "--json", wait=wait) == 130
    assert waits == [0.5] * 3
    assert len(capsys.readouterr().out.splitlines()) == 3


async def test_drain_answers_when_the_last_request_has_left(house: House) -> None:
    draining = asyncio.create_task(house.run("drain", "--deadline", "60"))
    socket = house.dealer()
    await until(lambda: bool(house.operator.deadlines), lambda: ask(socket, status_request()))
    assert not draining.done()
    house.operator.drained.set()
    assert await draining == 0
    assert house.operator.deadlines == [60.0]
    assert house.operator.state is NodeState.DRAINING


async def test_a_drain_that_is_not_done_in_time_exits_with_5(
    house: House, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await house.run("drain", "--deadline", "0.05", "--json") == 5
    shown = json.loads(capsys.readouterr().out)
    assert shown["ok"] is False
    assert shown["error"]["code"] == "timeout"


async def test_undrain_is_refused_with_6_unless_the_node_drains(
    house: House, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await house.run("undrain") == 6
    assert "the node is not draining" in capsys.readouterr().err
    house.operator.state = NodeState.DRAINING
    assert await house.run("undrain") == 0
    assert house.operator.state is NodeState.READY


async def test_a_status_is_answered_while_a_drain_waits(house: House) -> None:
    socket = house.dealer()
    await socket.send(admin_protocol.encode(Request(1, 1, Drain(60.0))))
    answer = await ask(socket, status_request(call_id=2))
    assert answer["call_id"] == 2
    assert answer["answer"]["status"]["state"] == "draining"
    house.operator.drained.set()
    assert json.loads(await socket.recv()) == {"call_id": 1, "answer": {"type": "Done"}}


async def test_a_console_that_leaves_does_not_cancel_its_drain(house: House) -> None:
    leaving, staying = house.dealer(), house.dealer()
    await leaving.send(admin_protocol.encode(Request(1, 1, Drain(60.0))))
    await until(lambda: bool(house.operator.deadlines), lambda: ask(staying, status_request()))
    leaving.close()
    house.operator.drained.set()
    assert (await ask(staying, status_request()))["answer"]["status"]["state"] == "draining"


async def test_only_so_many_consoles_may_wait_for_a_drain(house: House) -> None:
    socket = house.dealer()
    for call_id in range(MAX_PENDING_DRAINS + 1):
        await socket.send(admin_protocol.encode(Request(1, call_id, Drain(60.0))))
    refused = json.loads(await socket.recv())
    assert refused["call_id"] == MAX_PENDING_DRAINS
    assert refused["answer"]["code"] == "refused"


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b"", "empty document"),
        (b"\xff\x00garbage", "not valid UTF-8"),
        (b"[" * 100_000, ""),
        (b"null", "Expected `object`, got `null`"),
        (b'{"version": 1, "call_id": 1, "command": {"type": "Format"}}', "Invalid value 'Format'"),
        (b'{"version": 2, "call_id": 1, "command": {"type": "GetStatus"}}', "version 2"),
        (b'{"version": 1, "call_id": -1, "command": {"type": "GetStatus"}}', "$.call_id"),
        (
            b'{"version": 1, "call_id": 1, "command": {"type": "Drain", "deadline_s": 1e99}}',
            "$.command.deadline_s",
        ),
        (
            b'{"version": 1, "call_id": 1, "command": {"type": "GetStatus", "x": 1}}',
            "unknown field `x`",
        ),
    ],
)
async def test_garbage_is_answered_with_an_error_and_the_next_request_is_served(
    house: House, body: bytes, told: str
) -> None:
    socket = house.dealer()
    answer = await ask(socket, body)
    assert answer["call_id"] is None
    assert answer["answer"]["code"] == "bad_request"
    assert told in answer["answer"]["message"]
    assert len(answer["answer"]["message"]) <= 200
    assert (await ask(socket, status_request()))["call_id"] == 1


async def test_more_frames_than_one_are_answered_with_an_error(house: House) -> None:
    answer = await ask(house.dealer(), b"", status_request())
    assert answer["answer"]["message"] == "2 frames where one was due"


async def test_a_message_beyond_the_limit_cuts_off_its_sender_alone(house: House) -> None:
    hostile, honest = house.dealer(), house.dealer()
    watched = hostile.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    await hostile.send(b" " * (admin_protocol.MAX_ADMIN_MESSAGE_BYTES + 1))
    await watched.recv_multipart()
    hostile.disable_monitor()
    watched.close()
    assert (await ask(honest, status_request()))["call_id"] == 1


async def test_a_reader_that_takes_no_answers_does_not_stop_the_others_C21(house: House) -> None:
    stuck, honest = house.dealer(room=1), house.dealer()
    house.operator.model = "m" * 100_000  # a hundred such answers fit no socket's buffer
    for call_id in range(100):
        await stuck.send(status_request(call_id))
    assert (await ask(honest, status_request(7)))["call_id"] == 7


async def test_a_bug_in_the_operator_is_an_answer_not_the_end_of_the_daemon(
    house: House, caplog: pytest.LogCaptureFixture
) -> None:
    socket = house.dealer()
    house.operator.bug = KeyError("phase")
    answer = (await ask(socket, status_request()))["answer"]
    assert (answer["code"], answer["message"]) == ("internal", "KeyError: see the daemon's log")
    assert "KeyError: 'phase'" in caplog.text
    house.operator.bug = None
    assert (await ask(socket, status_request()))["answer"]["type"] == "StatusIs"


async def test_another_users_messages_are_refused(house: House) -> None:
    path, strangers = house.run_dir / "other.ipc", {os.getuid() + 1}
    served = AdminConsole(house.context, path, house.operator, allowed_uids=strangers)
    task = asyncio.create_task(served.serve())
    answer = await ask(house.dealer("other.ipc"), status_request())
    assert answer["answer"]["code"] == "not_permitted"
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_the_sockets_file_is_its_owners_alone(house: House) -> None:
    assert (house.run_dir / "admin.ipc").stat().st_mode & 0o077 == 0


def test_without_a_daemon_the_console_exits_with_3_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert console.main(["status", "--run-dir", str(tmp_path)]) == 3
    assert "is it running?" in capsys.readouterr().err


def test_a_dead_daemons_socket_exits_with_3(tmp_path: Path) -> None:
    context = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    socket.bind(f"ipc://{tmp_path / 'live.ipc'}")
    os.link(tmp_path / "live.ipc", tmp_path / "admin.ipc")
    context.destroy(linger=0)
    assert console.main(["status", "--json", "--run-dir", str(tmp_path)]) == 3


@pytest.mark.skipif(os.getuid() != 0, reason="only root can play another user")
def test_another_users_run_directory_exits_with_4(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").mkdir(mode=0o700)
    os.seteuid(65534)
    try:
        code = console.main(["status", "--run-dir", str(tmp_path / "run")])
    finally:
        os.seteuid(0)
    assert code == 4
    assert "another user's" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv", [[], ["reboot"], ["drain", "--deadline", "soon"], ["drain", "--deadline", "-1"]]
)
def test_wrong_usage_exits_with_2(argv: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        console.main(argv)
    assert ended.value.code == 2
