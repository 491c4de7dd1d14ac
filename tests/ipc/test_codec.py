"""Messages survive the wire; what is not of the protocol is refused, and a lost one is noticed."""

import zlib

import pytest

from ipc import codec
from ipc.codec import Kind, Numbering, SequenceGap, WireError
from ipc.kv_layout import RankLayout, Span
from ipc.messages import (
    Abort,
    Alive,
    Audit,
    Begun,
    Broken,
    Chunked,
    Command,
    Decode,
    Event,
    Exit,
    Gone,
    Hello,
    Loading,
    MixedPolicy,
    PeerDown,
    PeerUp,
    Preempted,
    Prefill,
    Prefilled,
    Pulled,
    Ready,
    Refused,
    Release,
    Released,
    SequenceStart,
    SetRole,
    Stats,
    TokenRow,
    Tokens,
)
from ipc.vocabulary import (
    DType,
    FinishReason,
    KVHandle,
    Role,
    SamplingParams,
    TokenLogprobs,
    WorkerName,
)

WORKER = WorkerName("prefill-0")
LAYOUT = RankLayout(Span(0, 2), Span(0, 1), 8, 16, 64, DType.FP32)
HANDLE = KVHandle("prefill-0", 2**62, 7, (3, 1, 2), 40)
SAMPLING = SamplingParams(max_tokens=5, seed=2**63 - 1, logit_bias=((3, -100.0),), top_k=4)
LOGPROBS = TokenLogprobs(5, -0.25, ((5, -0.25), (9, -3.5)))

COMMANDS: list[Command] = [
    Prefill(7, 1, (8, 9), (0, 1), (1, 2, 3), (), SAMPLING, prompt_logprobs=2),
    Decode(7, 1, HANDLE, (SequenceStart(8, 0, (4,)),), (1, 2, 3), SAMPLING),
    Abort(7, (8, 9)),
    Release(7),
    PeerUp(WORKER, 5, LAYOUT),
    PeerDown("prefill-0", 5),
    SetRole(Role.MIXED, MixedPolicy(chunk_tokens=64)),
    Audit(3, 10),
    Exit(),
]
EVENTS: list[Event] = [
    Hello(WORKER, 1234),
    Loading("weights", 0.5),
    Broken("no such model"),
    Ready(LAYOUT, "torch", 1.5),
    Begun((7, 8)),
    Chunked(7, 512, 1.0, 2.0),
    Prefilled(
        7, (4, 5), (None, FinishReason.STOP), HANDLE, 1.0, 2.0, (LOGPROBS, LOGPROBS), (None,)
    ),
    Pulled(7, 1024, 1.0, 2.0),
    Gone(7, (8,)),
    Preempted(8),
    Refused(7, (8,), "full"),
    Released("prefill-0", 5),
    Alive(3),
    Stats(
        **{**dict.fromkeys(Stats.__struct_fields__, 1), "pull_path": "peer"},  # type: ignore[arg-type]
    ),
]


def _summed(header: bytes) -> list[bytes]:
    """Frames with the right checksum."""
    return [header + zlib.crc32(b"{}", zlib.crc32(header)).to_bytes(4, "little"), b"{}"]


TOKENS = Tokens(1.5, (TokenRow(8, (4,)), TokenRow(9, (5,), FinishReason.LENGTH, (LOGPROBS,))))


def test_every_command_is_among_the_examples() -> None:
    assert {type(c) for c in COMMANDS} == set(Command.__args__)
    assert {type(e) for e in EVENTS} == set(Event.__args__)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda c: type(c).__name__)
def test_a_command_comes_out_as_it_went_in(command: Command) -> None:
    header, payload = codec.encode(command, Kind.COMMAND, 5, 0)
    assert codec.read_header([header, payload]).epoch == 5
    assert codec.read_command(payload) == command


@pytest.mark.parametrize("event", EVENTS, ids=lambda e: type(e).__name__)
def test_an_event_comes_out_as_it_went_in(event: Event) -> None:
    _, payload = codec.encode(event, Kind.EVENT, 5, 0)
    assert codec.read_event(Kind.EVENT, payload) == event


def test_the_hot_message_is_a_positional_array() -> None:
    _, payload = codec.encode(TOKENS, Kind.TOKENS, 5, 0)
    assert payload.startswith(b"[1.5,[[8,[4],null,null]")
    assert codec.read_event(Kind.TOKENS, payload) == TOKENS


def test_a_wrong_field_is_named_by_its_path() -> None:
    with pytest.raises(WireError, match=r"\$\.request_id"):
        codec.read_command(b'{"type":"Release","request_id":"x"}')


@pytest.mark.parametrize(
    "payload", [b"", b"{", b"[]", b"null", b'{"type":"Pickle"}', b"\xff\xfe", b'{"type":7}']
)
def test_garbage_is_a_wire_error(payload: bytes) -> None:
    with pytest.raises(WireError):
        codec.read_command(payload)


@pytest.mark.parametrize(
    ("frames", "why"),
    [
        ([], "0 frames where"),
        ([b""], "1 frames where"),
        ([b"x" * 22], "1 frames where"),
        ([b"x" * 22, b"{}"], "the checksum of a message"),
        (_summed(b"\x01\x01" + bytes(16)), "protocol 1 where 3 is spoken"),
        (_summed(b"\x03\x63" + bytes(16)), "unknown kind of message 99"),
    ],
)
def test_frames_of_another_protocol_are_a_wire_error(frames: list[bytes], why: str) -> None:
    with pytest.raises(WireError, match=why):
        codec.read_header(frames)


def test_a_bit_that_changed_on_the_way_is_a_wire_error() -> None:
    """Most of them would leave valid JSON of the right type behind, with another token in it."""
    frames = codec.encode(TOKENS, Kind.TOKENS, 5, 0)
    for frame in range(2):
        for bit in range(8 * len(frames[frame])):
            damaged = bytearray(frames[frame])
            damaged[bit // 8] ^= 1 << bit % 8
            with pytest.raises(WireError):
                codec.read_header(
                    [bytes(damaged), frames[1]] if frame == 0 else [frames[0], bytes(damaged)]
                )


@pytest.mark.parametrize("number", [0, 2])
def test_a_doubled_or_lost_message_is_a_gap(number: int) -> None:
    numbering = Numbering()
    numbering.check(0)
    with pytest.raises(SequenceGap):
        numbering.check(number)


@pytest.mark.parametrize("kind", [Kind.EVENT, Kind.TOKENS])
def test_a_nesting_without_end_is_refused_like_any_garbage(kind: Kind) -> None:
    deep = b"[1.0,[]," + b"[" * 100_000
    with pytest.raises(WireError):
        codec.read_event(kind, deep)
