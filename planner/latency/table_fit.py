"""Appendix A's coefficients from a measured table: what remains of it in a dozen numbers.

For shapes that were not measured (other pipelines of the same tp) and to see how well the form
holds on a device: the spreads say so.
"""

from ipc.latency import PrefillTerms, square_tokens
from ipc.profile_table import MixedPoint, ProfileTable
from planner.latency.fitted import Fit, FittedLatency, Interaction
from planner.latency.fitting import (
    DecodeSample,
    MixedSample,
    PrefillSample,
    fit_decode,
    fit_interaction,
    fit_prefill,
)
from planner.latency.interface import Chunk


def fit_table(table: ProfileTable, threshold: int | None = None) -> Fit:
    """Of whole steps; `threshold` splits decode in two regimes, as the published fits do."""
    prefill, prefill_spread = _fit_prefill(table)
    samples = [DecodeSample(p.batch, p.batch * p.context, p.ms / 1000) for p in table.decode]
    decode, decode_spread = fit_decode(samples, threshold)
    mixed = [p for p in table.mixed if p.batch]
    bare = Fit(prefill, decode, Interaction())
    interaction = _fit_interaction(bare, mixed) if mixed else None
    return Fit(prefill, decode, interaction, prefill_spread, decode_spread)


def _fit_prefill(table: ProfileTable) -> tuple[PrefillTerms, float]:
    prompts = [
        PrefillSample(p.num_prompts * p.num_tokens, p.num_prompts * p.num_tokens**2, p.ms / 1000)
        for p in table.prefill
    ]
    chunks = [
        PrefillSample(p.num_new, square_tokens(p.num_new, p.num_cached), p.ms / 1000)
        for p in table.mixed
        if not p.batch
    ]
    return fit_prefill([*prompts, *chunks])


def _fit_interaction(bare: Fit, points: list[MixedPoint]) -> Interaction:
    model = FittedLatency(bare)
    return fit_interaction(
        [
            MixedSample(
                p.num_new,
                p.batch,
                p.ms / 1000,
                model.mixed([Chunk(p.num_new, p.num_cached)], p.batch, p.batch * p.context).seconds,
            )
            for p in points
        ]
    )
