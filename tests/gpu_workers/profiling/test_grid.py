"""What is measured: as much of the grid as has room."""

from gpu_workers.profiling.grid import Grid, Room, StepShape, decode_steps, mixed_steps, pull_sizes

LARGE = Room(num_blocks=1456, block_size=32, max_context=4096, max_batch=32, max_step_tokens=4096)


def test_chunks_are_measured_with_and_without_cache_beside_small_and_large_batches() -> None:
    steps = mixed_steps(LARGE)
    beside = {step[1:] for step in steps if step.batch}
    assert beside == {
        (new, cached, batch, context)
        for new in (32, 128, 512)
        for cached in (0, 1024)
        for batch in (1, 8, 32)
        for context in (128, 1024)
    }
    alone = {(step.num_new, step.num_cached) for step in steps if not step.batch}
    assert alone == {(32, 1024), (128, 1024), (512, 1024)}


def test_a_step_that_does_not_fit_the_pool_is_left_out() -> None:
    assert LARGE.holds(StepShape(batch=11, context=4096))
    assert not LARGE.holds(StepShape(batch=12, context=4096))
    assert LARGE.holds(StepShape(1, 512, 1024, 32, 1024))
    crowded = LARGE._replace(num_blocks=1071)
    assert not crowded.holds(StepShape(1, 512, 1024, 32, 1024))


def test_nothing_is_larger_than_was_asked_for() -> None:
    room = LARGE._replace(max_context=512, max_batch=8, max_step_tokens=256)
    grid = Grid.of(room)
    assert max(step.num_prompts * step.num_new for step in grid.steps) == 256
    assert max(step.num_new + step.num_cached for step in grid.steps) <= 512
    assert max(step.batch for step in grid.steps) == 8
    assert max(step.context for step in grid.steps) == 512
    assert grid.pulls == [16, 64, 256, 512]
    assert all(grid)


def test_a_small_context_still_has_a_chunk_after_cached_tokens() -> None:
    steps = mixed_steps(LARGE._replace(max_context=512))
    assert {step.num_cached for step in steps} == {0, 256}
    assert {step.num_new for step in steps} == {32, 128}


def test_a_pull_is_no_longer_than_the_pool() -> None:
    assert pull_sizes(LARGE._replace(num_blocks=3)) == [16, 64]
    assert decode_steps(LARGE._replace(num_blocks=1)) == []
