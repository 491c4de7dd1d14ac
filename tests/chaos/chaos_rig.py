"""One instance with two steps under way at a time, over an engine whose blocks hold something."""

import random
from collections import deque
from typing import Any

from gpu_workers.prefill_side import Owner
from gpu_workers.scheduler import Scheduler
from ipc.messages import Audit, Command, MixedPolicy
from ipc.prefill_policy import BatchLimits
from ipc.vocabulary import Parallelism, Role
from tests.chaos.memory_engine import MemoryExchange, MemoryExecutor
from tests.gpu_workers.rig import BLOCK_SIZE, Rig

TWO_IN_FLIGHT = Parallelism(1, 2)
PIPELINED: dict[str, Any] = {"parallelism": TWO_IN_FLIGHT}
AHEAD: dict[str, Any] = {"max_in_flight": TWO_IN_FLIGHT.pp}


class ChaosRig(Rig):
    """A seed decides whether the next step is launched first or the oldest one collected, and
    whether the two under way are a pipeline's, or one sequence may be in both."""

    def __init__(
        self,
        role: Role,
        *,
        seed: int = 0,
        num_blocks: int = 64,
        max_tokens: int = 32,
        max_batch: int = 16,
        chunk_tokens: int | None = None,
        name: str = "here",
        epoch: int = 1,
    ) -> None:
        self.memory = MemoryExchange(num_blocks, BLOCK_SIZE)
        executor = MemoryExecutor(self.memory, BLOCK_SIZE)
        super().__init__(role, name=name, epoch=epoch, engine=(executor, self.memory))
        self.scheduler = Scheduler(
            Owner(name, epoch),
            role,
            MixedPolicy(chunk_tokens),
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            limits=BatchLimits(prefill_tokens=max_tokens, max_batch=max_batch),
            **(AHEAD if seed % 2 else PIPELINED),
        )
        self._random = random.Random(seed * 1_000_003 + epoch)
        self._in_flight: deque[Any] = deque()

    def connect(self, other: Rig) -> None:
        assert isinstance(other, ChaosRig)
        self.memory.peers[other.name, other.epoch] = other.memory.cells

    def tell(self, command: Command) -> None:
        if not isinstance(command, Audit):
            super().tell(command)

    def step(self) -> bool:
        acts = [self._launch, self._collect]
        self._random.shuffle(acts)
        has_acted = any(act() for act in acts)
        for pull in self.exchange.finished():
            self.scheduler.pulled(pull)
            has_acted = True
        self.check()
        return has_acted

    @property
    def is_all_free(self) -> bool:
        while self.step():
            pass
        return super().is_all_free

    def _launch(self) -> bool:
        if len(self._in_flight) == TWO_IN_FLIGHT.pp or (plan := self.scheduler.plan()) is None:
            return False
        self.now_s += 1.0
        self._in_flight.append(self.executor.launch(plan))
        self.scheduler.launched(plan, self.now_s)
        return True

    def _collect(self) -> bool:
        if not self._in_flight:
            return False
        result = self.executor.collect(self._in_flight.popleft())
        self.scheduler.collect(result, started_s=self.now_s, ended_s=self.now_s + 0.5)
        return True
