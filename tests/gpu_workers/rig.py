"""One instance without processes: the real scheduler, a scripted engine, steps taken by hand."""

from typing import Any

from gpu_workers.prefill_side import Owner
from gpu_workers.scheduler import Scheduler
from ipc.kv_layout import RankLayout, Span
from ipc.messages import (
    Abort,
    Begun,
    Chunked,
    Command,
    Decode,
    Event,
    MixedPolicy,
    PeerDown,
    Prefill,
    Release,
    SetRole,
    Tokens,
)
from ipc.prefill_policy import BatchLimits
from ipc.vocabulary import DType, PrefillPolicy, Role, SamplingParams
from tests.gpu_workers.scripted_engine import ScriptedExchange, ScriptedExecutor

BLOCK_SIZE = 4


class Rig:
    """Every step checks the plan, the books and the audit."""

    def __init__(
        self,
        role: Role,
        *,
        num_blocks: int = 64,
        max_tokens: int = 32,
        max_batch: int = 16,
        chunk_tokens: int | None = None,
        prefill_policy: PrefillPolicy = PrefillPolicy.FCFS,
        name: str = "here",
        epoch: int = 1,
        engine: tuple[Any, Any] | None = None,
    ) -> None:
        """`engine` is an executor and its exchange; scripted ones if left out."""
        self.name, self.epoch = name, epoch
        exchange = ScriptedExchange()
        self.executor, self.exchange = engine or (ScriptedExecutor(exchange, BLOCK_SIZE), exchange)
        self.scheduler = Scheduler(
            Owner(name, epoch),
            role,
            MixedPolicy(chunk_tokens),
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            limits=BatchLimits(max_tokens, max_batch, prefill_policy),
        )
        self.now_s = 0.0

    @property
    def pool(self) -> object:
        return self.scheduler.pool

    @property
    def layout(self) -> RankLayout:
        num_blocks = self.scheduler.pool.num_blocks
        return RankLayout(Span(0, 1), Span(0, 1), num_blocks, BLOCK_SIZE, 1, DType.FP32)

    def connect(self, other: "Rig") -> None:
        """Make the other's pool known here."""
        self.know(other.name, other.epoch)

    def know(self, instance: str, epoch: int) -> None:
        """A peer that is only a name."""
        self.exchange.known.add((instance, epoch))

    @property
    def num_sequences(self) -> int:
        """Sequences in the engine's table."""
        return len(self.executor.table)

    def close(self) -> None:
        """Give back what the engine holds."""

    @property
    def is_all_free(self) -> bool:
        return self.scheduler.pool.num_free == self.scheduler.pool.num_blocks

    def tell(self, command: Command) -> None:
        match command:
            case Prefill():
                self.scheduler.prefill(command)
            case Decode(handle=handle):
                if self.exchange.knows(handle.owner, handle.epoch):
                    self.scheduler.decode(command)
                else:
                    self.scheduler.refuse(command, "not connected")
            case Abort():
                self.scheduler.abort(command)
            case Release(request_id):
                self.scheduler.prefills.release(request_id)
            case SetRole(role, mixed):
                self.scheduler.set_role(role, mixed)
            case PeerDown(instance, epoch):
                self.scheduler.peer_down(instance, epoch)
                self.exchange.unmap_instance(instance, epoch)
            case _:
                raise AssertionError(f"the rig does not know {command}")

    def step(self) -> bool:
        """Plan, launch and collect one step; False when there was nothing to do."""
        plan = self.scheduler.plan()
        self.check()
        if plan is None:
            return False
        self.now_s += 1.0
        launched = self.executor.launch(plan)
        self.scheduler.launched(plan, self.now_s)
        self.check()
        result = self.executor.collect(launched)
        self.scheduler.collect(result, started_s=self.now_s, ended_s=self.now_s + 0.5)
        for pull in self.exchange.finished():
            self.scheduler.pulled(pull)
        self.check()
        return True

    def run(self) -> list[Event | Tokens]:
        """Step until nothing is left to do; all events."""
        while self.step():
            pass
        return self.take_events()

    def take_events(self) -> list[Event | Tokens]:
        events = list(self.scheduler.outbox)
        self.scheduler.outbox.clear()
        return events

    def check(self) -> None:
        pool = self.scheduler.pool
        assert pool.num_free + pool.num_held + pool.num_in_use == pool.num_blocks
        assert self.scheduler.audit() == []


def results(events: list[Event | Tokens]) -> list[Event | Tokens]:
    """All but what tells how prefills get on."""
    return [event for event in events if not isinstance(event, Begun | Chunked)]


def prefill(
    request_id: int,
    num_tokens: int,
    *,
    max_tokens: int = 8,
    num_choices: int = 1,
    output: tuple[int, ...] = (),
    end_token_ids: tuple[int, ...] = (),
) -> Prefill:
    """A prompt whose tokens follow from its request id."""
    return Prefill(
        request_id=request_id,
        arrival=request_id,
        seq_ids=tuple(1000 * request_id + i for i in range(num_choices)),
        choices=tuple(range(num_choices)),
        prompt=tuple(range(request_id, request_id + num_tokens)),
        output=output,
        sampling=SamplingParams(max_tokens=max_tokens, seed=0, end_token_ids=end_token_ids),
    )
