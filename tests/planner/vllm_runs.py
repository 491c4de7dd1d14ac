"""Runs of vLLM 0.19 that were measured request by request, and our replay of the same requests.

The rows are LLMServingSim's (commit 5daddb21, MIT): arrival is the engine's `queued_ts`, TTFT and
E2E count from there, and all stamps are the engine's own, without HTTP. Settings are that run's:
a budget of 2048 tokens a step, 256 sequences at most, blocks of 16 tokens.
"""

from dataclasses import dataclass, replace

import numpy as np

from ipc.prefill_policy import BatchLimits
from ipc.vocabulary import Role
from planner.latency.interface import LatencyModel
from planner.latency.layer_file import LayerFiles, Owner
from planner.latency.layer_table import LayerTable
from planner.simulator.run import simulate
from planner.simulator.service import InstanceModel, MixedRules, Service
from planner.simulator.timeline import Timeline
from planner.workload.requests import Floats, Requests
from tests.planner.reference_data import reference_file, reference_rows

MEASURED = "vllm_measured_requests.csv"
BUDGET_TOKENS = 2048
PERCENTILES = (50, 90, 99)
NUM_WARMING_UP = 11
"""Requests that met an engine still warming up: its first step took 0.2 s longer than any of its
kind later (kernels are compiled when first called)."""


@dataclass(frozen=True)
class RunOf:
    """Which rows, and what that engine was given."""

    gpu: str
    model: str
    parallel: str
    owner: Owner
    kv_tokens: int
    max_sequences: int


RTX4090 = RunOf(
    gpu="RTX4090",
    model="Llama-3.1-8B",
    parallel="tp1",
    owner=Owner("RTX4090", "meta-llama/Llama-3.1-8B", 1),
    kv_tokens=41_408,
    max_sequences=256,
)


@dataclass(frozen=True, eq=False)
class Seen:
    """Latencies of each request, measured or simulated, in seconds."""

    ttft_s: Floats
    tpot_s: Floats
    e2e_s: Floats

    def statistics(self) -> dict[str, float]:
        """Means and percentiles by name: "ttft mean", "tpot p90" and so on."""
        found = {}
        for name, values in (("ttft", self.ttft_s), ("tpot", self.tpot_s), ("e2e", self.e2e_s)):
            found[f"{name} mean"] = float(values.mean())
            for percent in PERCENTILES:
                found[f"{name} p{percent}"] = float(np.percentile(values, percent))
        return found


def measured(run: RunOf) -> tuple[Requests, Seen]:
    wanted = (run.gpu, run.model, run.parallel)
    rows = [r for r in reference_rows(MEASURED) if (r["gpu"], r["model"], r["parallel"]) == wanted]

    def column(name: str) -> Floats:
        return np.array([float(row[name]) for row in rows])

    requests = Requests(
        column("arrival_s"),
        column("input_tokens").astype(np.int64),
        column("output_tokens").astype(np.int64),
    )
    ttft_s, tpot_s, e2e_s = (column(name) / 1e3 for name in ("ttft_ms", "tpot_ms", "e2e_ms"))
    return requests, Seen(ttft_s, tpot_s, e2e_s)


def layer_table(run: RunOf) -> LayerTable:
    files = LayerFiles.within(reference_file("llmservingsim_dense_us.csv").parent)
    return LayerTable.read(files, run.owner)


def under_vllm_rules(run: RunOf, latency: LatencyModel) -> InstanceModel:
    """One block is vLLM's own: the null block."""
    return InstanceModel(
        Role.MIXED,
        latency,
        run.kv_tokens // 16 - 1,
        BatchLimits(prefill_tokens=BUDGET_TOKENS, max_batch=run.max_sequences),
        chunk_tokens=BUDGET_TOKENS,
        rules=MixedRules.VLLM_STAMPED,
    )


def under_our_rules(run: RunOf, latency: LatencyModel) -> InstanceModel:
    return replace(under_vllm_rules(run, latency), rules=MixedRules.OURS)


def replay(model: InstanceModel, requests: Requests) -> Timeline:
    return simulate(Service((model,)), requests)


def seen(timeline: Timeline) -> Seen:
    e2e_s = timeline.last_token_s - timeline.requests.arrival_s
    return Seen(timeline.ttft_s, timeline.tpot_s, e2e_s)


def errors(simulated: Seen, real: Seen) -> dict[str, float]:
    """Relative, by the names that `statistics` has."""
    found = real.statistics()
    return {name: value / found[name] - 1 for name, value in simulated.statistics().items()}
