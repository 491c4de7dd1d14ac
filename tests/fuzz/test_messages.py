"""What workers, consoles and other nodes send: a message, or the protocol's own error."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon import admin_protocol, node_messages
from daemon.admin_commands import (
    Abort,
    ApplyPlan,
    AuditBooks,
    Drain,
    GetEvents,
    GetRequests,
    GetStatus,
    GetTimelines,
    Restart,
    ScaleAdd,
    SetLogLevel,
    Shutdown,
    Undrain,
)
from daemon.admin_protocol import ADMIN_VERSION, BadMessage
from daemon.node_messages import Ended, Evicted, Join, Joined, Kill, Lend, Session, Spawn, Tell
from ipc import codec
from ipc.channel import PoolDescriptor
from ipc.codec import Kind, WireError
from ipc.messages import Exit, WorkerConfig
from ipc.vocabulary import DType, Parallelism, Role
from tests.fuzz.documents import BOMBS, noise, spoiled, spoiled_bytes
from tests.fuzz.strict_read import peak_bytes, strict_read
from tests.ipc.test_codec import COMMANDS, EVENTS, TOKENS, WORKER

CONFIG = WorkerConfig(
    name=WORKER,
    epoch=1,
    role=Role.PREFILL,
    parallelism=Parallelism(),
    endpoint="ipc:///run/x",
    model_dir="/models/x",
    dtype=DType.FP32,
    kv_bytes=1 << 20,
    block_size=16,
    max_context_tokens=64,
    prefill_tokens=32,
    max_batch=16,
)
FROM_HOME = [
    Join(version=1, home="a", silence_s=1.0, placement="x", model="y"),
    Spawn(CONFIG),
    Kill(WORKER, 1),
    Lend(WORKER, 1, PoolDescriptor(WORKER, 1)),
    Tell(WORKER, 1, Exit()),
]
FROM_HOST = [Joined(), Ended(WORKER, 1, "killed"), Evicted("unknown")]
REQUESTS = [
    admin_protocol.Request(ADMIN_VERSION, 1, command)
    for command in (
        GetStatus(),
        GetRequests("decode", 5),
        GetTimelines("x"),
        GetEvents(4, 1.0),
        AuditBooks(),
        Abort("7"),
        ApplyPlan("{}"),
        Drain(5.0, "decode-0"),
        Undrain(),
        Restart("decode-0"),
        ScaleAdd(Role.DECODE, 2, 2),
        SetLogLevel("debug", "daemon", 5.0),
        Shutdown(0.0),
    )
]
REPLIES = [
    admin_protocol.Reply(1, answer)
    for answer in (
        admin_protocol.Done(),
        admin_protocol.WouldDo(("drain",)),
        admin_protocol.EventsAre((), 3, 0),
        admin_protocol.RequestsAre((), False, 0),
    )
]


def plain(messages: Any) -> list[Any]:
    return [msgspec.to_builtins(message) for message in messages]


@given(st.one_of(noise(), spoiled(*plain(COMMANDS))))
def test_a_command_is_one_or_is_refused(payload: bytes) -> None:
    command = strict_read(lambda: codec.read_command(payload), WireError)
    if command is not None:
        again = codec.encode(command, Kind.COMMAND, 1, 2)[1]
        assert codec.read_command(again) == command


@given(st.sampled_from(Kind), st.one_of(noise(), spoiled(*plain([*EVENTS, TOKENS]))))
def test_an_event_is_one_or_is_refused(kind: Kind, payload: bytes) -> None:
    event = strict_read(lambda: codec.read_event(kind, payload), WireError)
    if event is not None:
        assert codec.read_event(kind, codec.encode(event, kind, 1, 2)[1]) == event


@given(st.lists(st.binary(max_size=40), max_size=4))
def test_frames_have_our_header_or_are_refused(frames: list[bytes]) -> None:
    assert strict_read(lambda: codec.read_header(frames), WireError) is None


@given(st.data(), st.sampled_from(COMMANDS))
def test_a_frame_that_was_damaged_on_its_way_is_refused(data: st.DataObject, command: Any) -> None:
    frames = codec.encode(command, Kind.COMMAND, 5, 7)
    which = data.draw(st.integers(0, 1))
    damaged = data.draw(spoiled_bytes(frames[which]))
    header = strict_read(
        lambda: codec.read_header([damaged if i == which else f for i, f in enumerate(frames)]),
        WireError,
    )
    assert header is None or damaged == frames[which]


@given(st.lists(st.one_of(st.binary(max_size=20), noise()), max_size=4))
def test_frames_of_another_node_are_a_message_or_are_refused(frames: list[bytes]) -> None:
    def read() -> None:
        node_messages.session_of(frames)
        node_messages.from_home(frames)

    strict_read(read, WireError)
    strict_read(lambda: Session(1).check(frames), WireError)


@given(st.one_of(noise(), spoiled(*plain(FROM_HOME))))
def test_a_nodes_order_is_one_or_is_refused(payload: bytes) -> None:
    order = strict_read(lambda: node_messages.from_home([b"", payload]), WireError)
    if order is not None:
        assert node_messages.from_home(Session(1).pack(order)) == order


@given(st.one_of(noise(), spoiled(*plain(FROM_HOST))))
def test_a_nodes_report_is_one_or_is_refused(payload: bytes) -> None:
    report = strict_read(lambda: node_messages.from_host([b"", payload]), WireError)
    if report is not None:
        assert node_messages.from_host(Session(1).pack(report)) == report


@given(st.one_of(noise(), spoiled(*plain(REQUESTS))))
def test_a_consoles_request_is_one_or_is_refused(body: bytes) -> None:
    request = strict_read(lambda: admin_protocol.read_request(body), BadMessage)
    if request is not None:
        assert admin_protocol.read_request(admin_protocol.encode(request)) == request


@given(st.one_of(noise(), spoiled(*plain(REPLIES))))
def test_a_reply_to_a_console_is_one_or_is_refused(body: bytes) -> None:
    strict_read(lambda: admin_protocol.read_reply(body), BadMessage)


@pytest.mark.parametrize("bomb", BOMBS, ids=lambda bomb: bomb[:8])
def test_no_message_makes_much_more_memory_of_itself(bomb: bytes) -> None:
    payload = b'{"type":"Gone","request_id":1,"seq_ids":' + bomb + b"}"
    bound = 100 * len(payload) + (1 << 20)
    assert peak_bytes(lambda: codec.read_event(Kind.EVENT, payload), WireError) < bound
    assert peak_bytes(lambda: admin_protocol.read_request(payload), BadMessage) < bound
