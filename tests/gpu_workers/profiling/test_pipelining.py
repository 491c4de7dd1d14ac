"""The slowest stage's share: steps in a row over a step alone, for each phase."""

from gpu_workers.profiling.grid import Grid, Room, StepShape
from gpu_workers.profiling.pipelining import slowest_stage
from gpu_workers.profiling.rounds import Budget
from ipc.profile_table import StageShares

ROOM = Room(num_blocks=1456, block_size=32, max_context=4096, max_batch=32, max_step_tokens=4096)
ONCE = Budget(1.0, 0.0, 1)


class Pipeline:
    """Steps of 100 ms, prompts 65 ms apart from each other and decodes 80 ms."""

    def __init__(self, prompt_ms: float = 65.0, decode_ms: float = 80.0) -> None:
        self._prompt_ms, self._decode_ms = prompt_ms, decode_ms
        self.asked: list[tuple[StepShape, int, int]] = []

    def step_ms(self, step: StepShape) -> float:
        return 100.0

    def interval_ms(self, step: StepShape, num_steps: int, in_flight: int) -> float:
        self.asked.append((step, num_steps, in_flight))
        return self._prompt_ms if step.num_prompts else self._decode_ms


def test_each_phase_has_the_share_of_its_own_slowest_stage() -> None:
    pipeline = Pipeline()
    assert slowest_stage(pipeline, Grid.of(ROOM), ROOM, 2, ONCE) == StageShares(0.65, 0.8)
    prompt, decode = StepShape(1, 512), StepShape(batch=8, context=256)
    assert sorted(pipeline.asked) == sorted([(prompt, 6, 2), (decode, 6, 2)])


def test_a_share_is_no_less_than_an_equal_one_and_no_more_than_all() -> None:
    assert slowest_stage(Pipeline(30.0, 120.0), Grid.of(ROOM), ROOM, 2, ONCE) == StageShares(0.5, 1)


def test_one_stage_has_no_slowest_one() -> None:
    assert slowest_stage(Pipeline(), Grid.of(ROOM), ROOM, 1, ONCE) is None


def test_steps_are_the_largest_below_the_usual_ones_and_as_many_as_have_room() -> None:
    small = ROOM._replace(num_blocks=32, max_context=256, max_batch=4, max_step_tokens=256)
    pipeline = Pipeline()
    assert slowest_stage(pipeline, Grid.of(small), small, 2, ONCE) is not None
    assert sorted(pipeline.asked) == sorted(
        [(StepShape(1, 256), 4, 2), (StepShape(batch=4, context=64), 4, 2)]
    )


def test_without_room_for_steps_in_a_row_nothing_is_said() -> None:
    tiny = ROOM._replace(num_blocks=2, max_context=64, max_batch=1)
    assert slowest_stage(Pipeline(), Grid.of(tiny), tiny, 2, ONCE) is None
