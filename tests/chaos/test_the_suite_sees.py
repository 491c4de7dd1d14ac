"""The chaos suite proves itself: with a safeguard out of action, the same runs go red.

Here, and only here, internals are patched: each case takes out one safeguard of the product and
names faults whose consequences it keeps from everybody.
"""

from collections.abc import Callable, Iterable
from itertools import product
from typing import Any, NamedTuple

import pytest

from daemon.heartbeat import Heartbeat
from daemon.instances import Instance, InstanceTable
from daemon.text import Tokenizer
from gpu_workers.block_pool import BlockPool
from gpu_workers.decode_side import DecodeSide
from gpu_workers.scheduler import Scheduler
from ipc.codec import Numbering
from tests.chaos.faults import Fault
from tests.chaos.memory_engine import MemoryExchange
from tests.chaos.scenario import one_fault, one_late_fault

SEEDS = range(32)  # as many as it takes: the first red one is enough
Patch = pytest.MonkeyPatch


def no_epochs_of_events(patch: Patch) -> None:
    """Whatever says that it comes from an instance is believed."""

    def get(table: InstanceTable, name: str, epoch: int | None = None) -> Instance | None:
        return table._up.get(name)

    patch.setattr(InstanceTable, "get", get)


def no_epochs_of_handles(patch: Patch) -> None:
    """Blocks are pulled out of whatever bears the owner's name now."""
    begin = MemoryExchange.begin

    def knows(exchange: Any, instance: str, epoch: int) -> bool:
        return any(name == instance for name, _ in exchange.peers)

    def begin_by_name(exchange: Any, pull: Any) -> None:
        latest = max(peer for peer in exchange.peers if peer[0] == pull.handle.owner)
        exchange.peers[pull.handle.owner, pull.handle.epoch] = exchange.peers[latest]
        begin(exchange, pull)

    patch.setattr(MemoryExchange, "knows", knows)
    patch.setattr(MemoryExchange, "begin", begin_by_name)
    patch.setattr(MemoryExchange, "unmap_instance", lambda *_: None)
    patch.setattr(DecodeSide, "peer_down", lambda *_: [])


def no_held_state(patch: Patch) -> None:
    """A prefilled prompt's blocks are free as soon as it is reported."""
    patch.setattr(BlockPool, "hold", lambda pool, _, block_ids: pool.release(block_ids))
    patch.setattr(BlockPool, "end_hold", lambda *_: False)


def no_fence(patch: Patch) -> None:
    """A released block is free though steps under way may still write to it."""
    patch.setattr(BlockPool, "_retire", lambda pool, block_id: pool._free.append(block_id))


def no_numbering(patch: Patch) -> None:
    """Messages may be lost, doubled and overtaken."""
    patch.setattr(Numbering, "check", lambda *_: None)


def no_watchdog(patch: Patch) -> None:
    """Nobody is asked, and nobody is found."""
    patch.setattr(Heartbeat, "beat", lambda _: None)


def no_audit(patch: Patch) -> None:
    patch.setattr(Scheduler, "audit", lambda _: [])


class Case(NamedTuple):
    """A safeguard, and whom it protects from what."""

    remove: Callable[[Patch], None]
    faults: tuple[Fault, ...]
    victims: tuple[str, ...]
    run: Callable[[Tokenizer, Fault, str, int], object] = one_fault


CASES = [
    Case(no_epochs_of_events, (Fault.STALE_UP,), ("p0", "d0", "m0")),
    Case(no_epochs_of_handles, (Fault.DEATH,), ("p0",)),
    Case(no_held_state, (Fault.PRESSURE, Fault.SLOW), ("d0",)),
    Case(no_fence, (Fault.PRESSURE,), ("d0", "m0")),
    Case(no_numbering, (Fault.DROPPED_UP, Fault.DUPLICATED_UP, Fault.DROPPED_DOWN), ("d0", "m0")),
    Case(no_watchdog, (Fault.FROZEN,), ("p0", "m0")),
    Case(no_watchdog, (Fault.DROPPED_UP, Fault.DROPPED_DOWN), ("p0", "d0"), one_late_fault),
    Case(no_audit, (Fault.DEATH,), ("p0",)),
]


Run = tuple[Fault, str, int]


def first_red(tokenizer: Tokenizer, case: Case) -> Run | None:
    runs: Iterable[Run] = product(case.faults, case.victims, SEEDS)
    return next((run for run in runs if is_red(tokenizer, case, run)), None)


def is_red(tokenizer: Tokenizer, case: Case, run: Run) -> bool:
    try:
        case.run(tokenizer, *run)
    except (AssertionError, LookupError):
        return True
    return False


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.remove.__name__)
def test_without_a_safeguard_the_suite_goes_red(tokenizer: Tokenizer, case: Case) -> None:
    with pytest.MonkeyPatch.context() as patch:
        case.remove(patch)
        red = first_red(tokenizer, case)
    assert red is not None
    assert not is_red(tokenizer, case, red)
