"""`distserve profile` on GPUs that are played: from the command to the planner."""

import re
from pathlib import Path
from typing import Any

import pytest

from gpu_workers.models.config import read_config
from gpu_workers.profiling.bench import StepBench
from gpu_workers.profiling.command import main
from gpu_workers.profiling.grid import StepShape
from gpu_workers.profiling.subject import Subject
from gpu_workers.profiling.whole_instance import instance
from ipc.messages import LoadFormat
from ipc.vocabulary import DeviceKind, DType, Parallelism
from planner.latency.measured import MeasuredLatency
from planner.latency.profile_file import read_profile
from tests.gpu_workers.checkpoints import llama_gqa
from tests.gpu_workers.profiling.played_machine import PlayedMachine


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama_gqa(tmp_path_factory.mktemp("profile") / "tiny")


def profile(model_dir: Path, out: Path, *arguments: str) -> int:
    brief = ["--max-context", "64", "--max-batch", "4", "--seconds", "0.2", "--kv-gib", "0.004"]
    asked = ["--model", str(model_dir), "--block-size", "16", "--out", str(out)]
    return main([*asked, *brief, *arguments], PlayedMachine())


def test_a_gpu_is_profiled_and_the_planner_reads_it(
    model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "gpu.json"
    assert profile(model_dir, out, "--device", "auto") == 0
    table = read_profile(out)
    assert (table.device, table.device_kind) == ("a played GPU", DeviceKind.CUDA)
    assert table.kernels.startswith("flashinfer-")
    assert table.pull_path == "local"
    assert [point.num_tokens for point in table.transfer] == [16, 64]
    assert MeasuredLatency(table).decode(4, 4 * 64.0).seconds(4 * 64.0) > 0
    said = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert "pulls are within a GPU" in said
    assert "the host waited for its core for" in said


@pytest.mark.parametrize("shape", [pytest.param((2, 1), marks=pytest.mark.slow), (1, 2)])
def test_ranks_on_gpus_are_profiled_together_each_with_a_pool_to_pull_from(
    model_dir: Path, tmp_path: Path, shape: tuple[int, int]
) -> None:
    out, (tp, pp) = tmp_path / "instance.json", shape
    assert profile(model_dir, out, "--device", "cuda:1", "--tp", str(tp), "--pp", str(pp)) == 0
    table = read_profile(out)
    assert (table.tp, table.pp, table.device) == (tp, pp, "a played GPU")
    assert [point.num_tokens for point in table.transfer] == [16, 64]
    assert (table.slowest_stage is None) == (pp == 1)


def subject(model_dir: Path, **changes: Any) -> Subject:
    fields: dict[str, Any] = {
        "model_dir": str(model_dir),
        "dtype": DType.BF16,
        "load_format": LoadFormat.SAFETENSORS,
        "max_context_tokens": 64,
        "block_size": 16,
        "kv_bytes": 1 << 22,
        "num_threads": 1,
        "parallelism": Parallelism(),
        "first_gpu": 0,
        "max_batch": 4,
    }
    return Subject(**fields | changes)


def test_decodes_on_a_gpu_are_timed_captured_and_two_under_way_as_they_are_served(
    model_dir: Path,
) -> None:
    with instance(subject(model_dir), machine=PlayedMachine()) as (engine, rank):
        device: Any = rank.place._gpu.device  # type: ignore[attr-defined]
        with_stopwatch = rank.place.stopwatch(is_alone=True)
        bench = StepBench(engine, with_stopwatch, rank.num_blocks)
        before = device.num_replays
        assert bench.served_ms(StepShape(batch=3, context=40)) > 0
        assert device.num_replays == before + 8
        bench.served_ms(StepShape(num_prompts=1, num_new=40))
        assert device.num_replays == before + 8  # prompts run eagerly
        assert rank.executor.num_sequences == 0
        with_stopwatch.close()


def test_the_clock_of_a_gpu_runs_from_an_idle_device_to_an_idle_one(model_dir: Path) -> None:
    place = PlayedMachine().gpu_place(subject(model_dir))
    device: Any = place._gpu.device
    device.tick()
    with place.stopwatch(is_alone=True) as stopwatch:
        assert device.past == device.now
        device.tick()
    assert device.past == device.now
    assert stopwatch.ms == pytest.approx(1000 * stopwatch.total_s)
    stopwatch.close()


def test_a_share_of_the_gpus_memory_decides_about_the_pool_where_its_size_is_not_said(
    model_dir: Path,
) -> None:
    def num_blocks(utilization: float) -> int:
        asked = subject(model_dir, gpu_memory_utilization=utilization, kv_bytes=0)
        layout = PlayedMachine().gpu_place(asked).layout(asked, read_config(model_dir).whole)
        return layout.num_blocks

    assert 0 < num_blocks(0.9) < num_blocks(0.95)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--device", "cuda:7", "--tp", "2"], "take 2 GPU(s) from cuda:7 on, and CUDA sees 8 here"),
        (["--device", "cuda", "--pull-from", "8"], "from cuda:8 on, and CUDA sees 8 here"),
        (["--device", "cuda", "--pp", "9"], "pp 9 is more than the"),
        (["--device", "cuda", "--kv-gib", "1e-9"], "hold no block"),
        (["--device", "cuda", "--kv-gib", "100"], "GiB are needed"),
    ],
)
def test_what_cannot_run_on_the_gpus_is_refused_in_one_sentence(
    model_dir: Path,
    tmp_path: Path,
    arguments: list[str],
    reason: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert profile(model_dir, tmp_path / "none.json", *arguments) == 1
    said = re.sub(r"\s+", " ", capsys.readouterr().err)
    assert reason in said
    assert "Traceback" not in said


def test_without_a_gpu_auto_is_the_cpu(model_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "cpu.json"
    brief = ["--model", str(model_dir), "--quick", "--seconds", "0.1", "--kv-gib", "0.01"]
    assert main([*brief, "--out", str(out)], PlayedMachine(num_gpus=0)) == 0
    assert read_profile(out).device_kind is DeviceKind.CPU
