"""How busy a service is: load times what one request takes, over what there is.

Little's law gives how many sequences decode at a time; the utilisation law, how much of the time
the prefill instances compute. Both hold in the long run alone. Where there is none, because the
service falls behind or the run is short, the means are the run's own, up to its last token.
"""

import msgspec
import numpy as np

from ipc.vocabulary import PrefillPolicy, Role
from planner.simulate.build import Built
from planner.simulator.timeline import Timeline

LONG_RUN = 10.0  # times a request's stay: the run's own means are then a tenth lower


class Use(msgspec.Struct, frozen=True):
    """How busy the instances are in the mean, by Little's law.

    Args:
        prefill_busy: share of the time in which a prefill instance computes; None where mixed
            instances prefill, or prompts in chunks.
        sequences: that decode at the same time in each instance.
        kv_share: of the decode pools that their tokens fill.
    """

    prefill_busy: float | None
    sequences: float
    kv_share: float


def use_of(timeline: Timeline, built: Built, *, keeps_up: bool) -> Use | None:
    """None for runs of an instant, which have no rate."""
    rate = timeline.requests.rate
    if rate == float("inf"):
        return None
    if not (keeps_up and _is_long(timeline)):
        rate = len(timeline) / float(timeline.last_token_s.max() - timeline.requests.arrival_s[0])
    requests, decode_s = timeline.requests, timeline.stages_s()["decode"]
    pools = [(group, model) for group, model in built.groups if group.role.decodes]
    pool_tokens = sum(g.count * m.kv_blocks for g, m in pools) * built.service.block_size
    held = float(np.mean(decode_s * (requests.input_tokens + requests.output_tokens / 2)))
    return Use(
        prefill_busy=_prefill_busy(timeline, built),
        sequences=rate * float(np.mean(decode_s)) / sum(group.count for group, _ in pools),
        kv_share=rate * held / pool_tokens,
    )


def _is_long(timeline: Timeline) -> bool:
    """Requests come for much longer than one of them stays."""
    arrival_s = timeline.requests.arrival_s
    stay_s = float(np.mean(timeline.last_token_s - arrival_s))
    return float(arrival_s[-1] - arrival_s[0]) > LONG_RUN * stay_s


def _prefill_busy(timeline: Timeline, built: Built) -> float | None:
    """Prompts that begin and end together were one batch; each stage had its part of that time."""
    pairs = [(group, model) for group, model in built.groups if group.role.prefills]
    groups = [group for group, _ in pairs]
    depths = {group.parallelism.pp for group in groups}
    if len(depths) > 1 or any(group.role is Role.MIXED for group in groups):
        return None
    if any(model.limits.prefill_policy is not PrefillPolicy.FCFS for _, model in pairs):
        return None
    starts_ends = np.stack([timeline.prefill_start_s, timeline.prefill_end_s])
    starts_s, ends_s = np.unique(starts_ends, axis=1)
    per_request_s = float((ends_s - starts_s).sum()) / len(timeline) / depths.pop()
    busy = timeline.requests.rate * per_request_s / sum(group.count for group in groups)
    return min(busy, 1.0)
