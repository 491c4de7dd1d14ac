"""A latency model of straight lines, and services and loads made of it."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ipc.prefill_policy import BatchLimits
from ipc.vocabulary import Role
from planner.latency.interface import EQUAL, Chunk, Estimate, Slowest, Source, StepLine
from planner.simulator.service import InstanceModel
from planner.workload.requests import Requests


@dataclass(frozen=True)
class LineModel:
    """Prefill a + b*tokens, decode a + b*context + c*batch, per stage a share of it."""

    prefill_s: tuple[float, float] = (0.015, 70e-6)
    decode_s: tuple[float, float, float] = (0.02, 0.6e-6, 40e-6)
    transfer_s: tuple[float, float] = (0.001, 1e-6)
    num_stages: int = 1
    slowest: Slowest = EQUAL
    until: float = float("inf")  # where a line ends: every so many tokens of context
    source: Source = Source.FITTED

    @property
    def num_devices(self) -> int:
        return self.num_stages

    def prefill(self, chunks: Sequence[Chunk]) -> Estimate:
        base_s, per_token_s = self.prefill_s
        num_tokens = sum(chunk.num_new for chunk in chunks)
        return Estimate((base_s + per_token_s * num_tokens) / self.num_stages, self.source)

    def decode(self, batch: int, context_tokens: float) -> StepLine:
        base_s, per_token_s, per_row_s = self.decode_s
        until = float("inf")
        if self.until != float("inf"):
            until = (context_tokens // self.until + 1) * self.until
        return StepLine(
            (base_s + per_row_s * batch) / self.num_stages,
            per_token_s / self.num_stages,
            until,
            self.source,
        )

    def mixed(self, chunks: Sequence[Chunk], batch: int, context_tokens: float) -> Estimate:
        decode_s = self.decode_s[1] * context_tokens + self.decode_s[2] * batch
        return Estimate(self.prefill(chunks).seconds + decode_s / self.num_stages, self.source)

    def transfer(self, num_tokens: int) -> Estimate:
        return Estimate(self.transfer_s[0] + self.transfer_s[1] * num_tokens, self.source)


LIMITS = BatchLimits(prefill_tokens=512, max_batch=256)


def instance(
    role: Role,
    latency: LineModel | None = None,
    *,
    kv_blocks: int = 10_000,
    limits: BatchLimits = LIMITS,
    chunk_tokens: int | None = None,
    plans_ahead: bool = False,
    leader_computes: bool = False,
) -> InstanceModel:
    return InstanceModel(
        role,
        latency or LineModel(),
        kv_blocks,
        limits,
        chunk_tokens,
        plans_ahead=plans_ahead,
        leader_computes=leader_computes,
    )


def chat(count: int, rate: float, seed: int = 0) -> Requests:
    """Poisson arrivals of log-normal lengths, as a chat has them."""
    random = np.random.default_rng(seed)
    return Requests(
        np.cumsum(random.exponential(1 / rate, count)),
        np.minimum(random.lognormal(6.0, 0.8, count).astype(np.int64) + 1, 1500),
        np.minimum(random.lognormal(4.0, 1.0, count).astype(np.int64) + 1, 500),
    )


def constant(count: int, rate: float, *, tokens: tuple[int, int], seed: int = 0) -> Requests:
    """Poisson arrivals of equal (input, output) lengths."""
    random = np.random.default_rng(seed)
    return Requests(
        np.cumsum(random.exponential(1 / rate, count)),
        np.full(count, tokens[0]),
        np.full(count, tokens[1]),
    )
