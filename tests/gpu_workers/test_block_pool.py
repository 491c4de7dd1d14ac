"""The block books: free + held + in use = total, and a block is free only when nobody needs it."""

import pytest

from gpu_workers.block_pool import BlockPool, NotEnoughBlocks


def books(pool: BlockPool) -> tuple[int, int, int]:
    """(free, held, in use)"""
    assert pool.num_free + pool.num_held + pool.num_in_use == pool.num_blocks
    return pool.num_free, pool.num_held, pool.num_in_use


def test_reserved_blocks_are_in_use_until_released() -> None:
    pool = BlockPool(8)
    blocks = pool.reserve(3)
    assert books(pool) == (5, 0, 3)
    pool.release(blocks)
    assert books(pool) == (8, 0, 0)


def test_a_reservation_that_does_not_fit_takes_nothing() -> None:
    pool = BlockPool(2)
    with pytest.raises(NotEnoughBlocks, match="3 blocks wanted, 2 free"):
        pool.reserve(3)
    assert books(pool) == (2, 0, 0)


def test_a_shared_block_counts_once_and_is_free_after_its_last_owner() -> None:
    pool = BlockPool(4)
    blocks = pool.reserve(2)
    pool.share(blocks)
    assert books(pool) == (2, 0, 2)
    pool.release(blocks)
    assert books(pool) == (2, 0, 2)
    pool.release(blocks)
    assert books(pool) == (4, 0, 0)


def test_held_blocks_are_freed_by_the_end_of_the_hold_and_only_once() -> None:
    pool = BlockPool(4)
    pool.hold(7, pool.reserve(3))
    assert books(pool) == (1, 3, 0)
    assert pool.end_hold(7)
    assert not pool.end_hold(7)
    assert books(pool) == (4, 0, 0)


def test_a_block_that_a_launched_step_may_name_is_not_free_before_its_collection() -> None:
    pool = BlockPool(4)
    first, second = pool.reserve(1), pool.reserve(1)
    pool.step_launched()
    pool.release(first)
    pool.step_launched()
    pool.release(second)
    assert books(pool) == (2, 0, 2)
    pool.step_collected()
    assert books(pool) == (3, 0, 1)
    pool.step_collected()
    assert books(pool) == (4, 0, 0)


def test_releasing_twice_is_our_own_bug() -> None:
    pool = BlockPool(4)
    blocks = pool.reserve(1)
    pool.release(blocks)
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(blocks)


def test_the_audit_agrees_with_true_tables() -> None:
    pool = BlockPool(6)
    shared, own = pool.reserve(2), pool.reserve(1)
    pool.share(shared)
    pool.hold(9, pool.reserve(1))
    pool.step_launched()
    pool.release(own)
    assert pool.check_integrity([*shared, *shared]) == []


def test_the_audit_names_a_leak_and_a_block_used_without_being_reserved() -> None:
    pool = BlockPool(4)
    (block,) = pool.reserve(1)
    assert pool.check_integrity([]) == [
        f"block {block}: 1 references in the books, 0 in the tables"
    ]
    assert pool.check_integrity([block, 3]) == [
        "block 3: 0 references in the books, 1 in the tables"
    ]
