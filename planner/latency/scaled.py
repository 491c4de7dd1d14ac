"""A latency model corrected by what a running service showed: other programs share its cores, its
caches are colder than a profile's, its device is hotter."""

from collections.abc import Sequence
from dataclasses import dataclass

from planner.latency.interface import Chunk, Estimate, LatencyModel, Slowest, Source, StepLine

SCALES = (1e-3, 1e3)
"""Factors outside tell of a mistake, not of a machine."""


@dataclass(frozen=True)
class ScaledLatency:
    """The model's answers times a factor for each phase; the sources are the model's."""

    model: LatencyModel
    prefill_scale: float = 1.0
    decode_scale: float = 1.0

    @property
    def num_stages(self) -> int:
        return self.model.num_stages

    @property
    def slowest(self) -> Slowest:
        return self.model.slowest

    @property
    def num_devices(self) -> int:
        return self.model.num_devices

    @property
    def source(self) -> Source:
        return self.model.source

    def prefill(self, chunks: Sequence[Chunk]) -> Estimate:
        seconds, source = self.model.prefill(chunks)
        return Estimate(seconds * self.prefill_scale, source)

    def decode(self, batch: int, context_tokens: float) -> StepLine:
        base_s, per_token_s, until, source = self.model.decode(batch, context_tokens)
        scale = self.decode_scale
        return StepLine(base_s * scale, per_token_s * scale, until, source)

    def mixed(self, chunks: Sequence[Chunk], batch: int, context_tokens: float) -> Estimate:
        seconds, source = self.model.mixed(chunks, batch, context_tokens)
        return Estimate(seconds * max(self.prefill_scale, self.decode_scale), source)

    def transfer(self, num_tokens: int) -> Estimate:
        return self.model.transfer(num_tokens)
