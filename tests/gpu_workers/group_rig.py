"""An instance of several ranks without processes: who acts next is decided by a seed.

The real scheduler, group and followers over scripted engines; plans and reports travel through
mailboxes, encoded as on the wire. Every rank may lag behind as far as the steps in flight allow.
"""

import random
from collections import deque
from typing import Any

import msgspec
import orjson

from gpu_workers.follower import Follower, Peers
from gpu_workers.group import GroupExchange, GroupExecutor, drawer, ranks
from gpu_workers.prefill_side import Owner
from gpu_workers.scheduler import Scheduler
from gpu_workers.step_plan import PullResult, StepPlan, StepResult
from ipc.messages import Command, MixedPolicy, PeerUp, Released
from ipc.prefill_policy import BatchLimits
from ipc.vocabulary import Parallelism, PrefillPolicy, Role, WorkerName
from tests.gpu_workers.rig import BLOCK_SIZE, Rig
from tests.gpu_workers.scripted_engine import ScriptedExchange, ScriptedExecutor


class Mailbox:
    """One follower's feed, and its reports on their way to the leader."""

    is_dismissed = False

    def __init__(self) -> None:
        self.plans: deque[bytes] = deque()
        self.reports: deque[bytes] = deque()

    def receive(self) -> list[StepPlan]:
        """At most one, so that others may act in between."""
        if not self.plans:
            return []
        return [msgspec.convert(orjson.loads(self.plans.popleft()), StepPlan)]

    def report(self, result: StepResult | PullResult) -> None:
        self.reports.append(msgspec.json.encode((type(result).__name__, result)))


class Mailboxes:
    """The leader's side of all of them."""

    def __init__(self, boxes: list[Mailbox]) -> None:
        self._boxes = boxes
        self._results: dict[int, StepResult] = {}
        self._pulls: list[PullResult] = []

    def send(self, plan: StepPlan) -> None:
        for box in self._boxes:
            box.plans.append(orjson.dumps(msgspec.to_builtins(plan)))

    def has_result(self, step_id: int) -> bool:
        return step_id in self._results

    def result(self, step_id: int, timeout_s: float) -> StepResult:
        return self._results.pop(step_id)

    def take_pulls(self) -> list[PullResult]:
        pulls, self._pulls = self._pulls, []
        return pulls

    def deliver(self, box: Mailbox) -> bool:
        """The oldest report of one follower; False when it has made none."""
        if not box.reports:
            return False
        name, content = orjson.loads(box.reports.popleft())
        if name == "StepResult":
            result = msgspec.convert(content, StepResult)
            self._results[result.step_id] = result
        else:
            self._pulls.append(msgspec.convert(content, PullResult))
        return True


class SilentLink:
    """A follower's link to the daemon, on which next to nothing is said."""

    def send(self, event: object) -> None:
        assert isinstance(event, Released), f"a follower has nothing to tell the daemon: {event}"

    def receive(self, timeout_s: float | None) -> list[Command]:
        return []


class GroupRig(Rig):
    """A rig of tp x pp ranks. `step` lets one of them do one thing."""

    def __init__(
        self,
        role: Role,
        parallelism: Parallelism,
        *,
        seed: int = 0,
        num_blocks: int = 64,
        max_tokens: int = 32,
        max_batch: int = 16,
        chunk_tokens: int | None = None,
        prefill_policy: PrefillPolicy = PrefillPolicy.FCFS,
        name: str = "here",
        epoch: int = 1,
    ) -> None:
        self.parallelism = parallelism
        self.random = random.Random(seed)
        names = ranks(name, parallelism)
        self.exchanges = [ScriptedExchange() for _ in names]
        self.executors = [
            ScriptedExecutor(exchange, BLOCK_SIZE, draws=rank == drawer(name, parallelism))
            for rank, exchange in zip(names, self.exchanges, strict=True)
        ]
        self.boxes = [Mailbox() for _ in names[1:]]
        self.mail = Mailboxes(self.boxes)
        self.followers = [
            self._follower(rank, index) for index, rank in enumerate(names[1:], start=1)
        ]
        self.group = GroupExecutor(self.executors[0], self.mail, parallelism)
        exchange: Any = GroupExchange(self.exchanges[0], self.mail, len(names))
        super().__init__(role, name=name, epoch=epoch, engine=(self.executors[0], exchange))
        self.scheduler = Scheduler(
            Owner(name, epoch),
            role,
            MixedPolicy(chunk_tokens),
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            limits=BatchLimits(max_tokens, max_batch, prefill_policy),
            parallelism=parallelism,
        )
        self.in_flight: deque[tuple[Any, set[int]]] = deque()  # with their sequences
        self.most_in_flight = 0

    def _follower(self, rank: WorkerName, index: int) -> Follower:
        exchange: Any = self.exchanges[index]

        def no_descriptor(peer: PeerUp) -> int:
            raise AssertionError(f"{peer.worker} is known here without introduction")

        return Follower(
            SilentLink(),
            self.boxes[index - 1],
            self.executors[index],
            exchange,
            Peers(exchange, no_descriptor),
            wait=lambda timeout_s: None,
            draws=rank == drawer(rank.instance, self.parallelism),
        )

    def know(self, instance: str, epoch: int) -> None:
        for exchange in self.exchanges:
            exchange.known.add((instance, epoch))

    @property
    def is_all_free(self) -> bool:
        self.settle()
        return super().is_all_free

    @property
    def num_sequences(self) -> int:
        """In all tables together, when everything under way has come to its end."""
        self.settle()
        return sum(len(executor.table) for executor in self.executors)

    @property
    def num_busy(self) -> int:
        """Steps with rows that are under way."""
        return sum(bool(rows) for _, rows in self.in_flight)

    def settle(self) -> None:
        while self.step():
            pass

    def step(self) -> bool:
        """Whoever the seed picks, of those who can do something; False when nobody can."""
        acts = [self.launch, self.collect]
        acts += [lambda f=f, b=b: self._follow(f, b) for f, b in self._followers_and_boxes]
        acts += [lambda b=b: self.mail.deliver(b) for b in self.boxes]
        self.random.shuffle(acts)
        has_acted = any(act() for act in acts)
        for pull in self.exchange.finished():
            self.scheduler.pulled(pull)
            has_acted = True
        self.check()
        return has_acted

    def launch(self) -> bool:
        if self.num_busy >= self.parallelism.pp or (plan := self.scheduler.plan()) is None:
            return False
        self.now_s += 1.0
        rows = {row.sequence for row in plan.rows}
        assert not any(rows & others for _, others in self.in_flight), "one is in two steps"
        self.in_flight.append((self.group.launch(plan), rows))
        self.scheduler.launched(plan, self.now_s)
        self.most_in_flight = max(self.most_in_flight, self.num_busy)
        return True

    def collect(self) -> bool:
        """The oldest step, if it has ended."""
        if not self.in_flight or not self.group.is_done(self.in_flight[0][0]):
            return False
        result = self.group.collect(self.in_flight.popleft()[0])
        self.scheduler.collect(result, started_s=self.now_s, ended_s=self.now_s + 0.5)
        return True

    @property
    def _followers_and_boxes(self) -> list[tuple[Follower, Mailbox]]:
        return list(zip(self.followers, self.boxes, strict=True))

    def _follow(self, follower: Follower, box: Mailbox) -> bool:
        plans = box.receive()
        for plan in plans:
            follower.carry_out(plan)
        return bool(plans)
