"""What a switch from one placement to another costs: loading, draining, and capacity meanwhile.

Instances of the same shape stay where they are. One that changes its role alone (`SetRole`) has
its weights already; one of another shape is loaded anew, on devices that are free or that an
instance which leaves must first drain: its requests finish there, since their keys and values do
not fit another shape. Costs are counted in requests, so that a gain can be held against them.
"""

from collections import Counter
from dataclasses import dataclass

import msgspec

from ipc.vocabulary import Parallelism, Role
from planner.deployment import Group
from planner.memory import MemoryRules, weight_bytes
from planner.model_shape import ModelShape
from planner.placement.choices import Candidate
from planner.replan.rules import ReplanError, SwitchRates

_Kind = tuple[Role, int | None]  # role and chunk tokens: what a leader's policy is
_Shapes = dict[Parallelism, Counter[_Kind]]


@dataclass(frozen=True)
class Fleet:
    """A placement as the planner counts it: so many copies of a candidate."""

    candidate: Candidate
    num_copies: int

    def __post_init__(self) -> None:
        if self.num_copies < 1:
            raise ReplanError(f"a placement has at least one copy, not {self.num_copies}")

    @property
    def num_devices(self) -> int:
        return self.num_copies * self.candidate.num_devices

    @property
    def groups(self) -> tuple[Group, ...]:
        return self.candidate.groups

    def shapes(self) -> _Shapes:
        """Instances of each shape, by what they do."""
        found: _Shapes = {}
        for group in self.groups:
            kinds = found.setdefault(group.parallelism, Counter())
            kinds[group.role, group.chunk_tokens] += group.count * self.num_copies
        return found


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """What becomes of the instances, in devices; `num_role_changes` counts instances."""

    kept: int
    num_role_changes: int
    loaded: int
    leaving: int
    longest_load_bytes: float


class SwitchCost(msgspec.Struct, frozen=True, kw_only=True):
    """The price of the switch.

    Args:
        load_s: until the last new instance serves, from the moment it has its devices.
        drain_s: until what a leaving instance holds is decoded.
        idle_device_s: devices that load or drain, times how long.
        taken: devices that must leave before the new ones can be loaded, for lack of free ones.
        lost_requests: that arrive meanwhile and exceed what still serves.
        requests: all of it as requests served: idle devices at the per-device goodput, and each
            lost request at the weight of a miss.
    """

    change: Change
    load_s: float
    drain_s: float
    idle_device_s: float
    taken: int
    lost_requests: float
    requests: float

    @property
    def reloads(self) -> bool:
        return self.change.loaded > 0


class Meanwhile(msgspec.Struct, frozen=True, kw_only=True):
    """What goes on while the placement changes.

    Args:
        rate: requests per second that arrive.
        goodput: of the old placement, requests per second.
        drain_s: how long the longest of its requests may still decode.
        miss_weight: requests served that one missed request counts as much as.
        free_devices: of the cluster, outside the old placement.
    """

    rate: float
    goodput: float
    drain_s: float
    miss_weight: float
    free_devices: int


def change(old: Fleet, new: Fleet, shape: ModelShape, memory: MemoryRules) -> Change:
    """Match instances shape by shape: first those that do the same, then those that could."""
    before, after = old.shapes(), new.shapes()
    kept = roles = loaded = leaving = 0
    longest = 0.0
    for parallelism in {**before, **after}:
        had, wants = before.get(parallelism, Counter()), after.get(parallelism, Counter())
        same, stays = (had & wants).total(), min(had.total(), wants.total())
        roles += stays - same
        kept += stays * parallelism.num_workers
        leaving += (had.total() - stays) * parallelism.num_workers
        if wants.total() > stays:
            loaded += (wants.total() - stays) * parallelism.num_workers
            longest = max(longest, weight_bytes(shape, parallelism, memory))
    return Change(
        kept=kept,
        num_role_changes=roles,
        loaded=loaded,
        leaving=leaving,
        longest_load_bytes=longest,
    )


def switch_cost(
    old: Fleet, changed: Change, meanwhile: Meanwhile, rates: SwitchRates
) -> SwitchCost:
    """The price of that change in that situation.

    New instances come up before old ones go, as far as there are free devices; what remains is
    taken from the serving ones. A change of role takes the instance out for `role_s`.
    """
    load_s = 0.0
    if changed.loaded:
        load_s = rates.start_s + changed.longest_load_bytes / rates.load_bytes_per_s
    drain_s = meanwhile.drain_s if changed.leaving else 0.0
    taken = min(max(changed.loaded - meanwhile.free_devices, 0), changed.leaving)
    role_devices_s = changed.num_role_changes * rates.role_s * _mean_instance(old)
    idle_device_s = changed.loaded * load_s + changed.leaving * drain_s + role_devices_s
    carried = meanwhile.goodput * (1 - taken / old.num_devices)
    # What exceeds the whole old placement is lost without a switch too.
    wanted = min(meanwhile.rate, meanwhile.goodput)
    lost = max(wanted - carried, 0.0) * (drain_s + load_s)
    per_device = meanwhile.goodput / old.num_devices
    return SwitchCost(
        change=changed,
        load_s=load_s,
        drain_s=drain_s,
        idle_device_s=idle_device_s,
        taken=taken,
        lost_requests=lost,
        requests=idle_device_s * per_device + meanwhile.miss_weight * lost,
    )


def _mean_instance(fleet: Fleet) -> float:
    """Devices of an instance, in the mean."""
    return fleet.candidate.num_devices / sum(group.count for group in fleet.groups)
