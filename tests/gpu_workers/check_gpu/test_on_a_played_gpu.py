"""The stages as they run on a GPU, on one that is played: its exporter is a process of its own."""

from typing import Any

import msgspec
import pytest

from gpu_workers.check_gpu.attention import check_attention
from gpu_workers.check_gpu.cuda_backend import CudaBackend
from gpu_workers.check_gpu.outcome import CheckFailed
from gpu_workers.check_gpu.pulls import check_death, check_pulls
from gpu_workers.check_gpu.steps import check_graphs
from gpu_workers.executor import Executor
from gpu_workers.step_plan import StepResult
from tests.gpu_workers.check_gpu.played_gpu import played_gpu


def test_pulls_between_processes_by_ipc_are_equal_C15() -> None:
    found = check_pulls(played_gpu(), ((1, 1), (2, 1), (1, 2)))
    assert found.detail.startswith("3 shapes into 5 kinds of ranks")


def test_an_exporter_that_is_killed_is_parted_from_and_followed_by_another_B2() -> None:
    assert "two exporters killed" in check_death(played_gpu()).detail


def test_attention_by_flashinfer_is_as_plain_attention() -> None:
    assert len(check_attention(played_gpu(), ((64, 6, 2), (128, 7, 1))).figures["errors"]) == 2


def test_captured_steps_draw_what_eager_ones_draw() -> None:
    found = check_graphs(played_gpu(), batches=(1, 3), num_tokens=5)
    assert found.detail == "captured and eager steps draw the same"


class Garbling(Executor):
    """Draws something else now and then."""

    def collect(self, launched: object) -> StepResult:
        result = super().collect(launched)
        rows = (msgspec.structs.replace(row, token_ids=(7,)) for row in result.rows)
        return StepResult(result.step_id, tuple(rows))


def test_a_gpu_whose_captured_steps_draw_otherwise_fails() -> None:
    class Wrong(CudaBackend):
        def executor(self, *what: Any, is_graphed: bool, **how: Any) -> Executor:
            executor = super().executor(*what, is_graphed=False, **how)
            executor.__class__ = Garbling if is_graphed else Executor
            return executor

    right = played_gpu()
    wrong = Wrong(right._gpu, right._make_exchange, ())
    with pytest.raises(CheckFailed, match=r"of 3 sequences, \[0, 1, 2\] go on otherwise"):
        check_graphs(wrong, batches=(3,), num_tokens=3)
