"""The paper's three engines as this planner simulates them, on A100s.

DistServe and vLLM have published coefficients for OPT-13B and OPT-66B. DeepSpeed-MII has none: it
stands here as chunked prefill with DistServe's raw kernels and its own default budget, an engine
that loses no time between steps. OPT-175B has none for any engine: a roofline stands for it.
"""

from planner.deployment import Group, Settings, service
from planner.latency.choose import Knowledge
from planner.latency.published import DEVICE
from planner.paper_curves import (
    COEFFICIENTS,
    MAX_BATCH,
    VLLM_PREFILL_TOKENS,
    PublishedCurve,
    paper_load,
    paper_service,
)
from planner.report.contents import Origin
from planner.report.runs import Setting
from planner.simulator.service import Service

NAMES = {"distserve": "DistServe", "vllm": "vLLM", "deepspeed": "DeepSpeed-MII"}
ROOFLINE_MODEL = "opt-175b"
UNKNOWN_NUM_REQUESTS = 200  # of OPT-175B's runs, which nobody tells: as many as OPT-66B's
# DeepSpeed's own defaults (inference/v2/ragged/manager_configs.py): max_ragged_batch_size and
# max_ragged_sequence_count. The authors started DeepSpeed-MII without setting them.
MII_CHUNK_TOKENS = 768
MII_MAX_BATCH = 512


def engine_setting(curve: PublishedCurve) -> Setting:
    """The deployment of a published curve, and as many requests as its runs had."""
    is_roofline = curve.model == ROOFLINE_MODEL
    return Setting(
        label=NAMES[curve.engine],
        service=_service(curve),
        workload=paper_load(curve.workload),
        num_requests=curve.num_requests or UNKNOWN_NUM_REQUESTS,
        known="roofline" if is_roofline else _coefficients(curve.engine),
        origin=Origin.ROOFLINE if is_roofline else Origin.SIMULATED,
    )


def raw_kernels(curve: PublishedCurve) -> Setting:
    """vLLM's deployment by its raw fits: an engine whose own work between steps takes no time."""
    groups, known = curve.groups, Knowledge(curve.model, profile="vllm-raw")
    settings = Settings(prefill_tokens=VLLM_PREFILL_TOKENS, max_batch=MAX_BATCH)
    found = engine_setting(curve)
    return Setting(
        label="vLLM, raw kernels",
        service=service(known, groups, settings),
        workload=found.workload,
        num_requests=found.num_requests,
        known="vllm-raw",
    )


def _coefficients(engine: str) -> str:
    if engine == "deepspeed":
        return f"distserve-raw, chunks of {MII_CHUNK_TOKENS}"
    return COEFFICIENTS[engine]


def _service(curve: PublishedCurve) -> Service:
    if curve.model == ROOFLINE_MODEL:
        tokens = VLLM_PREFILL_TOKENS if curve.engine == "vllm" else None
        settings = Settings(prefill_tokens=tokens, max_batch=MAX_BATCH)
        return service(Knowledge(curve.model, device=DEVICE), curve.groups, settings)
    if curve.engine != "deepspeed":
        return paper_service(curve)
    groups = tuple(
        Group(group.role, 1, group.parallelism, chunk_tokens=MII_CHUNK_TOKENS)
        for group in curve.groups
    )
    known = Knowledge(curve.model, profile="distserve-raw")
    return service(known, groups, Settings(max_batch=MII_MAX_BATCH))


def num_requests_told(curve: PublishedCurve) -> str:
    """For the sources of a page."""
    if curve.num_requests is not None:
        return f"{curve.num_requests} requests, as the authors' runs"
    return f"{UNKNOWN_NUM_REQUESTS} requests (the authors' number is not known)"
