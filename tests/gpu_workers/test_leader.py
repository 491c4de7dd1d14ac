"""The step loop around the scheduler: when it waits, what it sends, how it ends."""

from collections import deque
from collections.abc import Sequence

import pytest

from gpu_workers.leader import PULL_LOOK_S, Leader
from gpu_workers.step_plan import PullResult
from ipc.kv_layout import LayoutMismatch, RankLayout, Span
from ipc.messages import (
    Audit,
    Command,
    Decode,
    Event,
    Exit,
    PeerDown,
    PeerUp,
    Prefilled,
    Refused,
    Released,
    SequenceStart,
    Stats,
    Tokens,
)
from ipc.vocabulary import DType, KVHandle, Role, SamplingParams, WorkerName
from tests.gpu_workers.rig import BLOCK_SIZE, Rig, prefill
from tests.gpu_workers.scripted_engine import ScriptedExchange, ScriptedExecutor

LAYOUT = RankLayout(Span(0, 1), Span(0, 1), 8, 4, 8, DType.FP32)
PEER_UP = PeerUp(WorkerName("there"), 5, LAYOUT)
DECODE = Decode(
    2,
    2,
    KVHandle("there", 5, 2, (0, 1), 8),
    (SequenceStart(2000, 0, (1,)),),
    tuple(range(8)),
    SamplingParams(max_tokens=3, seed=0),
)


class ScriptedLink:
    """Hands out one batch of commands each time the leader looks; ends it when they are out."""

    def __init__(self, *batches: Sequence[Command]) -> None:
        self._batches = deque(batches)
        self.events: list[Event | Tokens] = []
        self.waits: list[float | None] = []

    def send(self, event: Event | Tokens) -> None:
        self.events.append(event)

    def receive(self, timeout_s: float | None) -> list[Command]:
        self.waits.append(timeout_s)
        if self._batches and (timeout_s is None or not self._batches[0]):
            return list(self._batches.popleft())
        return [Exit()] if timeout_s is None else []


def lead(rig: Rig, *batches: Sequence[Command]) -> ScriptedLink:
    link = ScriptedLink(*batches)

    def map_peer(peer: PeerUp) -> None:
        if peer.layout is not LAYOUT:
            raise LayoutMismatch("block_size differs: 8 at the source, 4 here")
        rig.exchange.known.add((peer.worker.instance, peer.epoch))

    Leader(link, rig.scheduler, rig.executor, rig.exchange, map_peer).run()  # type: ignore[arg-type]
    return link


def of_type(link: ScriptedLink, kind: type) -> list[object]:
    return [event for event in link.events if isinstance(event, kind)]


def test_it_waits_without_end_only_when_nothing_is_under_way() -> None:
    link = lead(Rig(Role.MIXED), [prefill(1, 5, max_tokens=4)])
    assert link.waits[0] is None
    assert link.waits[-1] is None
    assert link.waits[1:-1] == [0] * (len(link.waits) - 2)
    assert len(of_type(link, Tokens)) == 3


def test_a_prompt_goes_in_and_its_first_token_comes_out() -> None:
    link = lead(Rig(Role.PREFILL), [prefill(1, 5)])
    (event,) = of_type(link, Prefilled)
    assert isinstance(event, Prefilled)
    assert event.handle is not None
    assert event.ended_s >= event.started_s > 0


def test_a_peer_is_connected_before_its_handles_are_pulled() -> None:
    rig = Rig(Role.DECODE)
    link = lead(rig, [PEER_UP, DECODE])
    assert len(rig.exchange.pulls) == 1
    assert len(of_type(link, Tokens)) == 2


@pytest.mark.parametrize("before", [[], [PEER_UP, PeerDown("there", 5)]])
def test_a_handle_of_an_unconnected_peer_is_refused(before: list[Command]) -> None:
    link = lead(Rig(Role.DECODE), [*before, DECODE])
    assert of_type(link, Refused) == [Refused(2, (2000,), "there is not connected")]


def test_a_peer_whose_blocks_do_not_fit_is_never_connected() -> None:
    other = PeerUp(WorkerName("there"), 5, RankLayout(Span(0, 1), Span(0, 1), 8, 8, 8, DType.FP32))
    link = lead(Rig(Role.DECODE), [other, DECODE])
    assert len(of_type(link, Refused)) == 1


def test_the_books_are_sent_when_it_goes_idle_and_add_up() -> None:
    link = lead(Rig(Role.PREFILL), [prefill(1, 5)])
    stats = of_type(link, Stats)[-1]
    assert isinstance(stats, Stats)
    assert stats.blocks_held == 2
    assert stats.blocks_free + stats.blocks_held + stats.blocks_in_use == stats.blocks_total
    assert (stats.num_steps, stats.prefill_tokens, stats.audit_failures) == (1, 5, 0)


def test_an_audit_is_answered_by_the_books_even_when_they_are_unchanged() -> None:
    link = lead(Rig(Role.PREFILL), [Audit()], [Audit()])
    assert len(of_type(link, Stats)) == 3


def test_a_fault_in_the_books_is_counted() -> None:
    rig = Rig(Role.PREFILL)
    rig.scheduler.pool.reserve(1)
    stats = of_type(lead(rig, [Audit()]), Stats)[-1]
    assert isinstance(stats, Stats)
    assert stats.audit_failures > 0


class SlowExchange(ScriptedExchange):
    """Its copies go on after `begin`, as a device's do: they end at the fifth look."""

    def __init__(self) -> None:
        super().__init__()
        self.looks = 0

    def finished(self) -> list[PullResult]:
        self.looks += bool(self.pulls)
        return super().finished() if self.looks >= 5 else []


def test_a_copy_that_ends_later_is_taken_without_any_command() -> None:
    exchange = SlowExchange()
    rig = Rig(Role.DECODE, engine=(ScriptedExecutor(exchange, BLOCK_SIZE), exchange))
    link = lead(rig, [PEER_UP, DECODE])
    assert exchange.looks >= 5
    assert PULL_LOOK_S in link.waits
    assert len(of_type(link, Tokens)) == 2


def test_that_it_has_let_go_of_a_pool_is_said_once_it_is_closed() -> None:
    rig = Rig(Role.DECODE)
    link = lead(rig, [PEER_UP, PeerDown("there", 5)])
    assert of_type(link, Released) == [Released("there", 5)]
    assert not rig.exchange.knows("there", 5)


def test_the_way_that_pulls_take_is_in_the_books_C14() -> None:
    link, rig = ScriptedLink([]), Rig(Role.DECODE)
    rest = (rig.scheduler, rig.executor, rig.exchange, lambda peer: None)
    Leader(link, *rest, pull_path=lambda: "peer").run()
    books = [event for event in link.events if isinstance(event, Stats)]
    assert {one.pull_path for one in books} == {"peer"}
