"""The planner's arithmetic in Python is the library's own, and the room we keep does for it."""

import importlib.util
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu_workers.cuda_attention import WORKSPACE_BYTES, workspace_bytes
from tests.gpu_workers.cuda.flashinfer_planner import Heads, partial_bytes
from tests.gpu_workers.cuda.real_planner import RealPlanner, has_compiler

ENOUGH = 1 << 42
PAGE = 16
SHAPES = [Heads(q, kv, d) for q, kv, d in ((32, 8, 128), (64, 8, 128), (40, 40, 128))]
SHAPES += [Heads(q, kv, d) for q, kv, d in ((9, 3, 64), (16, 16, 256), (7, 1, 128), (32, 1, 128))]
Batch = tuple[list[int], list[int], bool]

spec = importlib.util.find_spec("flashinfer")
needs_library = pytest.mark.skipif(
    spec is None or not has_compiler(), reason="FlashInfer or a compiler for CUDA is not installed"
)


@pytest.fixture(scope="module")
def planner(tmp_path_factory: pytest.TempPathFactory) -> RealPlanner:
    assert spec is not None
    assert spec.origin is not None
    return RealPlanner(Path(spec.origin).parent / "data", tmp_path_factory.mktemp("planner"))


def batches(count: int) -> Iterator[Batch]:
    """New tokens and pages of each row, and whether the step is captured."""
    numbers = random.Random(0)
    for _ in range(count):
        is_captured = numbers.random() < 0.5
        rows = numbers.choice((1, 2, 8, 64, 256, 512) if is_captured else (1, 2, 5, 30))
        new = [1 if is_captured else numbers.choice((1, 2, 17, 128, 2048)) for _ in range(rows)]
        past = [numbers.choice((0, 5, 1000, 30000, 120000)) for _ in range(rows)]
        yield new, [-(-(n + p) // PAGE) for n, p in zip(new, past, strict=True)], is_captured


@pytest.mark.parametrize("heads", SHAPES)
def test_the_room_that_is_kept_is_that_which_any_batch_asks_for(heads: Heads) -> None:
    for new, pages, is_captured in batches(30):
        wanted = partial_bytes(new, pages, heads, PAGE, is_captured=is_captured)
        assert wanted <= workspace_bytes(*heads, graph_rows=len(new) if is_captured else 0)


def test_what_is_recommended_does_not_always_do() -> None:
    wanted = partial_bytes([1] * 256, [1] * 256, Heads(64, 8, 128), PAGE, is_captured=True)
    assert wanted > WORKSPACE_BYTES


@needs_library
@pytest.mark.parametrize("heads", SHAPES)
def test_the_library_asks_for_no_more_than_reckoned(planner: RealPlanner, heads: Heads) -> None:
    for new, pages, is_captured in batches(40):
        wanted = partial_bytes(new, pages, heads, PAGE, is_captured=is_captured)
        made = planner.plan(new, pages, heads, PAGE, is_captured=is_captured, room=wanted)
        assert made is not None
        assert bool(made[-1]) == bool(wanted)


@needs_library
@pytest.mark.parametrize("heads", SHAPES)
def test_the_plan_of_a_captured_size_is_the_same_for_all_lengths(
    planner: RealPlanner, heads: Heads
) -> None:
    """A graph remembers it: only what lies in the wrapper's memory may change."""
    numbers = random.Random(1)
    for rows in (1, 4, 24, 64):
        plans = set()
        for longest in (1, 2, 10, 100, 8192) * 4:
            pages = [numbers.randint(1, longest) for _ in range(rows)]
            made = planner.plan([1] * rows, pages, heads, PAGE, is_captured=True, room=ENOUGH)
            assert made is not None
            plans.add(tuple(made))
        assert len(plans) == 1
