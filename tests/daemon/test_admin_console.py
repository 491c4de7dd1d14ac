"""The daemon's end of the console, on a real socket: right users, wrong bytes, stuck readers."""

import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import zmq

from daemon import admin_protocol
from daemon.admin_commands import ApplyPlan, Drain, GetEvents, Restart
from daemon.admin_console import MAX_WAITING, MAX_WAITING_IN_ALL
from daemon.admin_door import LocalDoor
from daemon.admin_views import NodeState
from tests.daemon.console_house import House, ask, request_of, status_request


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    opened = House(tmp_path)
    yield opened
    await opened.close()


async def until(happened: Callable[[], bool], wake: Callable[[], Awaitable[object]]) -> None:
    """Exchange messages until something has happened on the other side."""
    while not happened():
        await wake()


async def test_a_status_is_answered_while_a_drain_waits(house: House) -> None:
    socket = house.dealer()
    await socket.send(request_of(Drain(60.0), 1))
    answer = await ask(socket, status_request(call_id=2))
    assert answer["call_id"] == 2
    assert answer["answer"]["status"]["state"] == "draining"
    house.operator.drained.set()
    assert json.loads(await socket.recv())["answer"]["type"] == "Done"


async def test_a_console_that_leaves_does_not_cancel_its_drain(house: House) -> None:
    leaving, staying = house.dealer(), house.dealer()
    await leaving.send(request_of(Drain(60.0)))
    await until(lambda: bool(house.operator.orders), lambda: ask(staying, status_request()))
    leaving.close()
    house.operator.drained.set()
    assert (await ask(staying, status_request()))["answer"]["status"]["state"] == "draining"


async def test_one_console_may_wait_for_so_many_commands_and_another_still_for_its_own(
    house: House,
) -> None:
    greedy, honest = house.dealer(), house.dealer()
    for call_id in range(MAX_WAITING + 1):
        await greedy.send(request_of(Drain(60.0), call_id))
    refused = json.loads(await greedy.recv())
    assert refused["call_id"] == MAX_WAITING
    assert refused["answer"]["code"] == "refused"
    assert (await ask(honest, request_of(GetEvents())))["answer"]["type"] == "EventsAre"


async def test_all_consoles_together_may_wait_for_so_many_commands(house: House) -> None:
    consoles = [house.dealer() for _ in range(MAX_WAITING_IN_ALL // MAX_WAITING)]
    for socket in consoles:
        for call_id in range(MAX_WAITING):
            await socket.send(request_of(Drain(60.0), call_id))
    await until(
        lambda: len(house.operator.orders) == MAX_WAITING_IN_ALL,
        lambda: ask(house.dealer(), status_request()),
    )
    assert (await ask(house.dealer(), request_of(Drain(60.0))))["answer"]["code"] == "refused"
    house.operator.drained.set()


async def test_each_order_is_a_log_line_with_who_gave_it(
    house: House, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "daemon.admin_console")
    socket = house.dealer()
    await ask(socket, request_of(Restart("d0", 5.0)))
    await ask(socket, request_of(Restart("d0", 5.0, dry_run=True)))
    await ask(socket, request_of(ApplyPlan("x" * 10_000)))
    lines = [record.message for record in caplog.records]
    by = f"by user {os.getuid()}, process {os.getpid()}"
    assert lines == [
        f"admin console: Restart instance=d0 deadline_s=5.0, {by}",
        f"admin console: ApplyPlan text='10000 characters' deadline_s=120.0, {by}",
    ], "a dry run changes nothing"


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
            b'{"version": 1, "call_id": 1, "command": {"type": "GetEvents", "wait_s": 1e9}}',
            "$.command.wait_s",
        ),
        (
            b'{"version": 1, "call_id": 1, "command": {"type": "GetRequests", "slowest": 1000}}',
            "$.command.slowest",
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
    house.serve(LocalDoor(house.context, house.run_dir / "other.ipc", {os.getuid() + 1}))
    answer = await ask(house.dealer("other.ipc"), request_of(Drain(1.0)))
    assert answer["answer"]["code"] == "not_permitted"
    assert house.operator.heard == []
    assert house.operator.state is NodeState.READY


async def test_the_sockets_file_is_its_owners_alone(house: House) -> None:
    assert (house.run_dir / "admin.ipc").stat().st_mode & 0o077 == 0
