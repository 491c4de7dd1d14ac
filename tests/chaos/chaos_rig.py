"""One instance with two steps under way at a time, over an engine whose blocks hold something."""

import random
from typing import Any

from gpu_workers.prefill_side import Owner
from gpu_workers.scheduler import Scheduler
from ipc.messages import Audit, Command, MixedPolicy
from ipc.prefill_policy import BatchLimits
from ipc.vocabulary import Parallelism, Role
from tests.chaos.memory_engine import MemoryExchange, MemoryExecutor
from tests.chaos.two_in_flight import IN_FLIGHT, TwoInFlight
from tests.gpu_workers.rig import BLOCK_SIZE, Rig

PIPELINED: dict[str, Any] = {"parallelism": Parallelism(1, IN_FLIGHT)}
AHEAD: dict[str, Any] = {"max_in_flight": IN_FLIGHT}


class ChaosRig(TwoInFlight):
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
        dice = random.Random(seed * 1_000_003 + epoch)
        super().__init__(role, name=name, epoch=epoch, engine=(executor, self.memory), dice=dice)
        self.scheduler = Scheduler(
            Owner(name, epoch),
            role,
            MixedPolicy(chunk_tokens),
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            limits=BatchLimits(prefill_tokens=max_tokens, max_batch=max_batch),
            **(AHEAD if seed % 2 else PIPELINED),
        )

    def connect(self, other: Rig) -> None:
        assert isinstance(other, ChaosRig)
        self.memory.peers[other.name, other.epoch] = other.memory.cells

    def tell(self, command: Command) -> None:
        if not isinstance(command, Audit):
            super().tell(command)
