"""L_m, the shortest prompt that saturates the device (arXiv 2401.09670, section 3.1).

It is the length from which the prefill throughput of a single prompt, in tokens per second, is at
least `SATURATION` of the best. Below it prompts are worth packing together; above it a prompt is
run alone. Measured throughput is noisy, so the rule asks a smoothed curve: single outliers are
replaced by running medians of three, what then still falls on the way up to the best is levelled
(isotonic regression), and the crossing is interpolated between the measured lengths. Where it is
shallow, an error of a percent in the times moves L_m by a tenth or more, and means as little.
"""

import math
from collections.abc import Sequence

from ipc.profile_table import SATURATION, PrefillPoint

KNEE = 4  # lengths within this factor of L_m decide about it


def saturation_tokens(points: Sequence[PrefillPoint]) -> int:
    """L_m of the single prompts among these points, at least one."""
    single = sorted((p for p in points if p.num_prompts == 1), key=lambda p: p.num_tokens)
    lengths = [math.log(point.num_tokens) for point in single]
    rising = _rise(_running_medians([math.log(point.tokens_per_s) for point in single]))
    enough = rising[-1] + math.log(SATURATION)
    first = next(i for i, throughput in enumerate(rising) if throughput >= enough)
    if first == 0:
        return single[0].num_tokens
    part = (enough - rising[first - 1]) / (rising[first] - rising[first - 1])
    return round(math.exp(lengths[first - 1] + part * (lengths[first] - lengths[first - 1])))


def is_near_knee(num_tokens: int, saturation: int) -> bool:
    return saturation <= KNEE * num_tokens and num_tokens <= KNEE * saturation


def _running_medians(values: Sequence[float]) -> list[float]:
    """Of each value and its neighbours. Runs that rise or fall stay as they are.

    An end is held between its neighbour and where the line through the next two points to it
    (Tukey's rule for the ends of running medians).
    """
    if len(values) < 3:
        return list(values)
    inner = [_middle(*values[i - 1 : i + 2]) for i in range(1, len(values) - 1)]
    if len(inner) < 2:
        return [values[0], *inner, values[-1]]
    first = _middle(values[0], inner[0], 3 * inner[0] - 2 * inner[1])
    last = _middle(values[-1], inner[-1], 3 * inner[-1] - 2 * inner[-2])
    return [first, *inner, last]


def _middle(a: float, b: float, c: float) -> float:
    return sorted((a, b, c))[1]


def _rise(values: Sequence[float]) -> list[float]:
    """The non-decreasing curve nearest to the values up to their largest, by least squares.

    Pools of neighbours that would fall are replaced by their mean (pool adjacent violators).
    """
    pools: list[list[float]] = []
    for value in values[: values.index(max(values)) + 1]:
        pools.append([value])
        while len(pools) > 1 and _mean(pools[-2]) > _mean(pools[-1]):
            falling = pools.pop()
            pools[-1] += falling
    return [_mean(pool) for pool in pools for _ in pool]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
