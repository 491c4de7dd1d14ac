"""The stages as they run on a GPU, on one that is played: its exporter is a process of its own."""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import msgspec
import pytest
import torch

from gpu_workers.check_gpu.attention import Heads, check_attention
from gpu_workers.check_gpu.bandwidth import check_bandwidth
from gpu_workers.check_gpu.cuda_backend import CudaBackend
from gpu_workers.check_gpu.graphs import check_graphs
from gpu_workers.check_gpu.host_costs import measure_host
from gpu_workers.check_gpu.layouts import Load, compare_layouts
from gpu_workers.check_gpu.model import check_model
from gpu_workers.check_gpu.modules import build_modules
from gpu_workers.check_gpu.outcome import CheckFailed, Verdict
from gpu_workers.check_gpu.pulls import check_death, check_pulls
from gpu_workers.check_gpu.stage_process import StageProcess
from gpu_workers.check_gpu.steps import SMALL, measure_steps
from gpu_workers.check_gpu.tiny_models import TINY
from gpu_workers.cuda_runner import CudaRunner
from gpu_workers.executor import Executor
from gpu_workers.step_plan import StepResult
from ipc.vocabulary import DType
from tests.gpu_workers.check_gpu.played_gpu import ROOT, PlayedModule, all_compiled, played_gpu
from tests.gpu_workers.cuda.fake_flashinfer import FakeFlashInfer


def ignored(name: str, value: object) -> None:
    """A figure that a test does not look at."""


def test_pulls_between_processes_by_ipc_are_equal_C15() -> None:
    figures: dict[str, Any] = {}
    said = check_pulls(played_gpu(), figures.__setitem__, ((1, 1), (2, 1), (1, 2)))
    assert said.startswith("3 shapes into 5 kinds of ranks")
    assert said.endswith("all equal, by way of: local")
    assert figures["by way of the host"] == "1572864 bytes equal"


def test_an_exporter_that_is_killed_is_parted_from_and_followed_by_another_B2() -> None:
    assert "two exporters killed" in check_death(played_gpu(), ignored)


def test_attention_by_flashinfer_is_as_plain_attention_padded_heads_and_both_types_too() -> None:
    errors: dict[str, Any] = {}
    heads = (Heads(64, 6, 2), Heads(128, 7, 1), Heads(80, 2, 2))
    check_attention(played_gpu(), errors.__setitem__, heads)
    assert list(errors) == [
        f"{dtype} {shape}"
        for dtype in ("bfloat16", "float16")
        for shape in ("64x6/2", "128x7/1", "80x2/2")
    ]
    assert all(error < 0.02 for error in errors.values())


def not_compiled(
    dtypes: Iterable[str], head_dims: Iterable[int], extras: Iterable[str]
) -> Iterator[tuple[str, Callable[[], PlayedModule]]]:
    for head_dim in head_dims:
        yield from (
            (f"attention {dtype} {head_dim}", lambda: PlayedModule(False)) for dtype in dtypes
        )


def test_a_width_that_is_not_compiled_in_time_is_left_out_and_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gpu_workers.check_gpu.attention.COMPILING_S", 0.0)
    figures: dict[str, Any] = {}
    gpu = played_gpu(modules=not_compiled)
    with pytest.raises(CheckFailed, match="no module of attention is compiled, and none could"):
        check_attention(gpu, figures.__setitem__, (Heads(256, 2, 2),), (DType.BF16,))
    assert figures["bfloat16 256x2/2"].startswith("left out: its module is not compiled")


def test_modules_are_loaded_in_the_order_of_their_worth_each_with_its_seconds() -> None:
    figures: dict[str, Any] = {}
    said = build_modules(played_gpu(), figures.__setitem__)
    assert said.startswith("9 modules after")
    assert list(figures)[:5] == ["rope", "page", "silu", "attention bf16 128", "attention bf16 64"]
    assert figures["rope"]["state"] == "compiled ahead"


class WithoutACompiler(PlayedModule):
    """Attention over fp16 was not compiled ahead, and cannot be here."""

    def build_and_load(self) -> None:
        raise RuntimeError("ninja: no nvcc")


def half_compiled(
    dtypes: Iterable[str], head_dims: Iterable[int], extras: Iterable[str]
) -> Iterator[tuple[str, Callable[[], PlayedModule]]]:
    for name, generate in all_compiled(dtypes, head_dims, extras):
        yield name, (lambda: WithoutACompiler(False)) if "fp16" in name else generate


def test_a_module_that_cannot_be_compiled_does_not_keep_the_others_from_being_loaded() -> None:
    figures: dict[str, Any] = {}
    with pytest.raises(CheckFailed, match="cannot be had: attention fp16 128, attention fp16 64"):
        build_modules(played_gpu(modules=half_compiled), figures.__setitem__)
    assert figures["attention fp16 128"]["state"] == "RuntimeError: ninja: no nvcc"
    assert figures["attention bf16 256"]["state"] == "compiled ahead"


def test_nothing_more_is_compiled_when_others_want_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gpu_workers.check_gpu.modules.COMPILING_S", 0.0)
    figures: dict[str, Any] = {}
    said = build_modules(played_gpu(modules=half_compiled), figures.__setitem__)
    assert said.endswith("3 left out")
    assert figures["attention fp16 64"].startswith("left out: it is not compiled")


def test_attention_goes_on_without_the_widths_that_cannot_be_compiled() -> None:
    class Uncompiled(FakeFlashInfer):
        def BatchPrefillWithPagedKVCacheWrapper(self, *given: Any, **named: Any) -> Any:
            wrapper = super().BatchPrefillWithPagedKVCacheWrapper(*given, **named)
            plan = wrapper.plan

            def compiling(*what: Any, **how: Any) -> None:
                if how["q_data_type"] is torch.float16:
                    raise RuntimeError("ninja: no nvcc")
                plan(*what, **how)

            wrapper.plan = compiling
            return wrapper

    figures: dict[str, Any] = {}
    gpu = played_gpu(flashinfer=Uncompiled, modules=half_compiled)
    said = check_attention(gpu, figures.__setitem__, (Heads(64, 2, 2),))
    assert said.endswith("over 1 shapes, 1 left out")
    assert figures["float16 64x2/2"].startswith("left out: its module cannot be compiled: ")


def test_captured_steps_draw_what_eager_ones_draw_with_two_under_way_too() -> None:
    figures: dict[str, Any] = {}
    said = check_graphs(played_gpu(), figures.__setitem__, batches=(1, 3), num_tokens=5)
    assert said.startswith("captured and eager steps draw the same: 12 of 12 equal")
    ways = ("captured, 1", "captured, 2", "eager, 2")
    assert list(figures) == [f"batch {n}, {way} under way" for n in (1, 3) for way in ways]


def test_a_model_on_a_gpu_draws_what_transformers_holds_for_likely() -> None:
    figures: dict[str, Any] = {}
    check_model(played_gpu(), figures.__setitem__, ("tiny",))
    assert figures["tiny"]["of"] == 6 * 24


def test_steps_are_measured_eager_captured_and_as_they_are_served() -> None:
    figures: dict[str, Any] = {}
    measure_steps(played_gpu(), figures.__setitem__, SMALL)
    for kind in ("eager", "captured", "served"):
        assert figures[f"decode_{kind}_ms"].keys() == figures["decode_floor_ms"].keys()
    assert figures["prefill 64"]["tokens_per_s"] > 0


def test_the_hosts_part_of_a_step_is_measured_by_parts() -> None:
    figures: dict[str, Any] = {}
    measure_host(played_gpu(), figures.__setitem__, (1, 3))
    assert figures["batch 3"].keys() == {"prepare_us", "arrays_us", "upload_us", "plan_us"}


def test_attention_is_timed_on_pools_of_blocks_and_of_layers() -> None:
    figures: dict[str, Any] = {}
    compare_layouts(played_gpu(), figures.__setitem__, Load(TINY, num_rows=3, context=40))
    assert figures["block_major_takes_times"] == pytest.approx(
        figures["block_major_ms"] / figures["per_layer_ms"]
    )


def test_pulls_are_measured_in_every_way_beside_a_copy() -> None:
    figures: dict[str, Any] = {}
    check_bandwidth(played_gpu(), figures.__setitem__, blocks_kib=(256,), pool_bytes=4 << 20)
    assert figures["256 KiB"].keys() >= {
        *("pull_gb_s", "merged_gb_s", "single_gb_s", "batch_gb_s", "copy_gb_s"),
        *("beside_work_gb_s", "work_takes_times", "share", "host_gb_s"),
    }
    assert figures["runs of 16 KiB"].keys() == {"single_gb_s", "batch_gb_s"}


SERVES = """
from gpu_workers.check_gpu import command
from tests.gpu_workers.check_gpu.played_gpu import played_gpu

command.serve_stages(played_gpu)
"""


def test_stages_run_on_a_gpu_in_a_process_of_their_own_one_after_the_other() -> None:
    python = ["env", f"PYTHONPATH={ROOT}", sys.executable, "-P", "-c", SERVES]
    with StageProcess(python) as process:
        for stage in ("probe", "modules", "host", "pulls"):
            outcome = process.run(stage, 200)
            assert outcome.verdict is Verdict.PASS, outcome
        assert outcome.figures["by way of the host"].endswith("bytes equal")


class Garbling(Executor):
    """Draws something else now and then."""

    def collect(self, launched: object) -> StepResult:
        result = super().collect(launched)
        rows = (msgspec.structs.replace(row, token_ids=(7,)) for row in result.rows)
        return StepResult(result.step_id, tuple(rows))


def test_a_gpu_whose_captured_steps_draw_otherwise_fails() -> None:
    class Wrong(CudaBackend):
        def executor(self, *what: Any, **how: Any) -> Executor:
            executor = super().executor(*what, **how)
            executor.__class__ = Garbling
            return executor

    right = played_gpu()
    wrong = Wrong(right._gpu, right._make_exchange, ())
    with pytest.raises(CheckFailed, match=r"sequences \[0, 1, 2\] of 3 go on otherwise, with a"):
        check_graphs(wrong, ignored, batches=(3,), num_tokens=3)


class Forgetful(CudaRunner):
    """Leaves no drawn token on the device, where the next step would find it."""

    def _keep(self, drawn: torch.Tensor, lines: Sequence[int | None]) -> None:
        pass


def test_a_gpu_that_loses_tokens_of_steps_under_way_fails_with_two_of_them() -> None:
    class Wrong(CudaBackend):
        def executor(self, *what: Any, **how: Any) -> Executor:
            executor = super().executor(*what, **how)
            executor._runner.__class__ = Forgetful
            return executor

    right, figures = played_gpu(), dict[str, Any]()
    wrong = Wrong(right._gpu, right._make_exchange, ())
    with pytest.raises(CheckFailed, match="batch 3, captured, 2 under way: sequences"):
        check_graphs(wrong, figures.__setitem__, batches=(3,), num_tokens=6)
    assert figures == {"batch 3, captured, 1 under way": "3 of 3 equal"}


def test_a_model_that_draws_what_transformers_holds_for_unlikely_fails() -> None:
    class Wrong(CudaBackend):
        def eager(self, executor: Executor) -> Executor:
            eager = super().eager(executor)
            eager.__class__ = Garbling
            return eager

    right = played_gpu()
    wrong = Wrong(right._gpu, right._make_exchange, ())
    with pytest.raises(CheckFailed, match=r"tiny: a token is .* of the logits' spread less likely"):
        check_model(wrong, ignored, ("tiny",))
