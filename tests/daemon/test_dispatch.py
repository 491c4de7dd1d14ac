"""Who prefills, who decodes: plain arithmetic over loads."""

import pytest

from daemon.dispatch import DecodeLoad, PrefillLoad, pick_decode, pick_prefill
from daemon.worker_configs import cpu_share


@pytest.mark.parametrize(
    ("queues", "picked"), [((0,), 0), ((5, 3, 9), 1), ((4, 4), 0), ((1, 0, 0), 1)]
)
def test_the_shortest_queue_in_tokens_prefills(queues: tuple[int, ...], picked: int) -> None:
    assert pick_prefill([PrefillLoad(queued_tokens=q) for q in queues]) == picked


@pytest.mark.parametrize(
    ("loads", "picked"),
    [
        (((10, 100, 1), (5, 100, 9)), 1),  # fewer blocks
        (((10, 100, 1), (15, 200, 1)), 1),  # a smaller share of a larger pool
        (((10, 100, 3), (10, 100, 2)), 1),  # equal blocks: the smaller batch
        (((0, 100, 0), (0, 100, 0)), 0),
    ],
)
def test_the_least_loaded_instance_decodes(
    loads: tuple[tuple[int, int, int], ...], picked: int
) -> None:
    assert pick_decode([DecodeLoad(*load) for load in loads]) == picked


@pytest.mark.parametrize(
    ("num_cores", "num_workers", "asked", "share_of_second"),
    [
        (2, 2, None, ((1,), 1)),
        (8, 2, None, ((3, 4, 5), 3)),
        (2, 4, None, ((), 1)),
        (8, 2, 4, ((4, 5, 6, 7), 4)),
        (2, 2, 4, ((), 4)),
    ],
)
def test_cores_are_shared_equally_and_one_is_left_to_the_daemon(
    num_cores: int, num_workers: int, asked: int | None, share_of_second: object
) -> None:
    cores = range(num_cores)
    assert cpu_share(cores, 1, num_workers=num_workers, num_threads=asked) == share_of_second


def test_of_equally_short_queues_the_one_that_decodes_least_is_taken() -> None:
    """A bug: idle queues were all equal, so the first mixed instance got every request."""
    loads = [PrefillLoad(0, num_sequences=3), PrefillLoad(0, num_sequences=1), PrefillLoad(5)]
    assert pick_prefill(loads) == 1
