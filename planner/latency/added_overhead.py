"""The published fits with the engine's own work added to a step, not multiplied into it.

DistServe's repository multiplies its fits of vLLM 0.2.3 by hand-set factors (1.4 prefill, 1.2
decode) until OPT-13B on one GPU agrees with what was measured. What the factors stand for is an
engine that schedules, samples and detokenises in Python between steps: so much time for each
step, however long the kernels take. So the same extra seconds are taken where the factors were
set, and added to the raw fits of every model and degree. For OPT-13B little changes; longer steps
are no longer charged more than the engine can have spent on them.
"""

import msgspec

from ipc.latency import DecodeRegimes, PrefillTerms
from ipc.vocabulary import Parallelism
from planner.devices import device_sheet
from planner.latency.fitted import Fit, FittedLatency
from planner.latency.published import DEVICE, published_fit
from planner.latency.pull import pull_over
from planner.memory import kv_capacity
from planner.model_catalog import model_shape

ANCHOR_MODEL, ANCHOR_TP = "opt-13b", 1
# Where the factors were set: ShareGPT prompts (767 tokens in the mean), and decode batches that
# fill half of the pool with contexts of 928 tokens, ShareGPT's mean weighted by output.
ANCHOR_PROMPT_TOKENS = 767
ANCHOR_CONTEXT_TOKENS = 928
ANCHOR_POOL_SHARE = 0.5


def engine_overheads_s(engine: str) -> tuple[float, float]:
    """What the hand-set factors add to a prefill and to a decode step where they were set."""
    shipped = published_fit(engine, ANCHOR_MODEL, ANCHOR_TP)
    raw = published_fit(engine, ANCHOR_MODEL, ANCHOR_TP, raw=True)
    prompt = ANCHOR_PROMPT_TOKENS
    prefill_s = [f.prefill.seconds(prompt, prompt**2) for f in (shipped, raw)]
    shape, device = model_shape(ANCHOR_MODEL), device_sheet(DEVICE)
    pool = kv_capacity(shape, device, Parallelism(ANCHOR_TP)).num_tokens
    context = int(pool * ANCHOR_POOL_SHARE)
    batch = context // ANCHOR_CONTEXT_TOKENS
    decode_s = [f.decode.terms(batch).seconds(batch, context) for f in (shipped, raw)]
    return prefill_s[0] - prefill_s[1], decode_s[0] - decode_s[1]


def added_overhead_latency(engine: str, model: str, parallelism: Parallelism) -> FittedLatency:
    """Raw coefficients, and the engine's own seconds on top of each step."""
    prefill_s, decode_s = engine_overheads_s(engine)
    raw = published_fit(engine, model, parallelism.tp, raw=True)
    fit = Fit(_added(raw.prefill, prefill_s), _added_to_both(raw.decode, decode_s))
    pull = pull_over(device_sheet(DEVICE), model_shape(model), parallelism)
    return FittedLatency(fit, parallelism, pull=pull)


def _added(terms: PrefillTerms, seconds: float) -> PrefillTerms:
    return msgspec.structs.replace(
        terms, base_s=terms.base_s + seconds, floor_s=terms.floor_s + seconds
    )


def _added_to_both(regimes: DecodeRegimes, seconds: float) -> DecodeRegimes:
    small, large = (
        msgspec.structs.replace(terms, base_s=terms.base_s + seconds)
        for terms in (regimes.small, regimes.large)
    )
    return DecodeRegimes(small, large, regimes.threshold)
