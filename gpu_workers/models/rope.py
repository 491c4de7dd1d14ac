"""Rotary position embedding: the angles of every position, with the scaling variants in use.

The formulas of the scaled variants are those of the papers named below, in the form in which
checkpoints give their numbers (Hugging Face `rope_parameters`).
"""

import math

import torch

from gpu_workers.models.config import RopeConfig, RopeKind


def rope_table(rope: RopeConfig, head_dim: int, num_positions: int) -> torch.Tensor:
    """Cosines and sines of every position: fp32 [num_positions, 2, head_dim / 2].

    Halves rotate as in the GPT-NeoX convention: element i pairs with element i + head_dim / 2.
    """
    inv_freq, scale = inverse_frequencies(rope, head_dim)
    angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * inv_freq[None, :]
    return torch.stack((angles.cos(), angles.sin()), dim=1) * scale


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[torch.Tensor, float]:
    """Radians per position of each pair, fp32 [head_dim / 2], and the factor on cos and sin."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    inv_freq = 1.0 / rope.theta**exponents
    match rope.kind:
        case RopeKind.DEFAULT | RopeKind.DYNAMIC:
            return inv_freq, 1.0
        case RopeKind.LINEAR:
            return inv_freq / rope.factor, 1.0
        case RopeKind.LLAMA3:
            return _llama3(inv_freq, rope), 1.0
        case RopeKind.YARN:
            return _yarn(inv_freq, rope, head_dim), _yarn_scale(rope)


def _llama3(inv_freq: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """Long wavelengths are divided by the factor, short ones kept, those between blended.

    Source: Llama 3.1 (arXiv 2407.21783) and its model card's `rope_scaling`.
    """
    turns = rope.original_positions * inv_freq / (2 * math.pi)  # over the trained length
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * inv_freq / rope.factor + blend * inv_freq


def _yarn(inv_freq: torch.Tensor, rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Interpolate slow pairs, keep fast ones, ramp between. Source: YaRN, arXiv 2309.00071, 3.2."""
    low, high = _yarn_range(rope, head_dim)
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)
    kept = 1 - ramp.clamp(0.0, 1.0)
    return inv_freq / rope.factor * (1 - kept) + inv_freq * kept


def _yarn_range(rope: RopeConfig, head_dim: int) -> tuple[float, float]:
    """The pairs between which the ramp runs: those that turn beta_fast and beta_slow times."""

    def pair_that_turns(times: float) -> float:
        wavelengths = rope.original_positions / (times * 2 * math.pi)
        return head_dim * math.log(wavelengths) / (2 * math.log(rope.theta))

    low, high = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    return low, high if high != low else high + 0.001


def _yarn_scale(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return _mscale(rope.factor, rope.mscale) / _mscale(rope.factor, rope.mscale_all_dim)
    return _mscale(rope.factor, 1.0)


def _mscale(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0
