"""One phase alone: the other one costs nothing and holds everything (paper section 4.1).

Prefill depends on its arrivals only, and decode on when prompts are finished; so Algorithm 1
finds the best shape of each phase apart, n + m searches in place of n * m. Together they do a
little worse: the same request must meet both targets, and finished prompts do not arrive as
Poisson does. The composed placement is simulated as a whole for that.
"""

from collections.abc import Sequence
from math import inf

from ipc.prefill_policy import BatchLimits
from ipc.vocabulary import Role
from planner.latency.interface import EQUAL, Chunk, Estimate, Source, StepLine
from planner.simulator.service import InstanceModel

EVERYTHING = 1 << 40  # blocks, tokens or sequences: more than any run has


class Costless:
    """A latency model of an instance that takes no time."""

    num_stages = 1
    slowest = EQUAL
    num_devices = 0
    source = Source.FITTED

    def prefill(self, chunks: Sequence[Chunk]) -> Estimate:
        return Estimate(0.0, self.source)

    def decode(self, batch: int, context_tokens: float) -> StepLine:
        return StepLine(0.0, 0.0, inf, self.source)

    def mixed(self, chunks: Sequence[Chunk], batch: int, context_tokens: float) -> Estimate:
        return Estimate(0.0, self.source)

    def transfer(self, num_tokens: int) -> Estimate:
        return Estimate(0.0, self.source)


def without_decode(prefills: Sequence[InstanceModel]) -> tuple[InstanceModel, ...]:
    """These instances, and a decode side for requests that never come there."""
    return (*prefills, _costless(Role.DECODE))


def without_prefill(decodes: Sequence[InstanceModel]) -> tuple[InstanceModel, ...]:
    """These instances; prompts are there at the moment they arrive."""
    return (_costless(Role.PREFILL), *decodes)


def _costless(role: Role) -> InstanceModel:
    return InstanceModel(role, Costless(), EVERYTHING, BatchLimits(EVERYTHING, EVERYTHING))
