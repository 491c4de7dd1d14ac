"""`distserve profile --tp --pp`: whole steps of an instance whose ranks are real processes."""

import gc
import json
import re
import threading
from contextlib import closing
from pathlib import Path

import msgspec
import orjson
import pytest

from gpu_workers.models.config import read_config
from gpu_workers.plan_bus import LeaderBus
from gpu_workers.profiling import ranks
from gpu_workers.profiling.bench import StepBench
from gpu_workers.profiling.command import main
from gpu_workers.profiling.grid import StepShape
from gpu_workers.profiling.stopwatch import Stopwatch
from gpu_workers.profiling.subject import Subject
from gpu_workers.profiling.whole_instance import instance
from gpu_workers.step_plan import StepPlan, StepResult
from ipc.messages import LoadFormat
from ipc.profile_table import ProfileTable
from ipc.vocabulary import DType, Parallelism
from planner.latency.measured import MeasuredLatency
from tests.gpu_workers.checkpoints import llama_gqa
from tests.gpu_workers.scripted_engine import ScriptedExchange


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama_gqa(tmp_path_factory.mktemp("profile") / "tiny")


def test_a_pipeline_is_profiled_and_the_planner_reads_it(
    model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "tiny.json"
    arguments = ["--model", str(model_dir), "--quick", "--kv-gib", "0.01", "--seconds", "0.2"]
    assert main([*arguments, "--pp", "2", "--out", str(out)]) == 0
    table = msgspec.convert(orjson.loads(out.read_bytes()), ProfileTable)
    assert (table.tp, table.pp) == (1, 2)
    assert table.kv_bytes_per_token == read_config(model_dir).kv_bytes_per_token(DType.BF16)
    assert [point.num_tokens for point in table.transfer] == [16, 64, 256, 512]
    assert table.slowest_stage is not None
    assert 0.5 <= min(table.slowest_stage.prefill, table.slowest_stage.decode) <= 1.0
    said = capsys.readouterr().out
    assert "tiny at tp 1, pp 2" in said
    assert "the slowest of 2 stages takes" in said
    latency = MeasuredLatency.read(out)
    assert (latency.num_stages, latency.num_devices) == (2, 2)
    # Whole steps are told in stages. Steps that fell where they should rise are levelled.
    stages_ms = 2e3 * latency.decode(8, 8 * 256.0).seconds(8 * 256.0)
    measured_ms = [point.ms for point in table.decode]
    assert min(measured_ms) * (1 - 1e-6) <= stages_ms <= max(measured_ms) * (1 + 1e-6)


def test_a_step_is_timed_when_every_rank_has_taken_in_what_it_needs(model_dir: Path) -> None:
    subject = Subject(
        model_dir=str(model_dir),
        dtype=DType.FP32,
        load_format=LoadFormat.SAFETENSORS,
        max_context_tokens=256,
        block_size=16,
        kv_bytes=1 << 22,
        num_threads=1,
        parallelism=Parallelism(2, 1),
    )
    with instance(subject) as (engine, leader):
        bench = StepBench(engine, Stopwatch())
        times = [bench.step_ms(StepShape(batch=4, context=200)) for _ in range(5)]
        assert all(ms > 0 for ms in times)
        assert leader.executor.num_sequences == 1  # the one whose step shows that all are through
        assert engine.model.shard.heads.size == engine.model.config.num_heads // 2


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        (["--tp", "4"], "tp 4 does not divide the 6 attention heads of tiny"),
        (["--pp", "9"], "pp 9 is more than the"),
        (["--tp", "2", "--kv-gib", "1e-9"], "hold no block"),
    ],
)
def test_a_shape_that_cannot_run_is_refused_in_one_sentence(
    model_dir: Path, shape: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--model", str(model_dir), *shape]) == 1
    said = re.sub(r"\s+", " ", capsys.readouterr().err)
    assert reason in said
    assert "Traceback" not in said


def test_a_model_without_weights_is_told_of_once_and_leaves_no_process(
    model_dir: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = json.loads((model_dir / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["--model", str(tmp_path), "--pp", "2"]) == 1
    said = capfd.readouterr().err
    assert "distserve profile: " in said
    assert "Traceback" not in said


class WhetherCollecting:
    """An executor that computes nothing, and notes whether Python collects garbage meanwhile."""

    def __init__(self) -> None:
        self.seen: list[bool] = []

    def launch(self, plan: StepPlan) -> StepPlan:
        self.seen.append(gc.isenabled())
        return plan

    def collect(self, launched: StepPlan) -> StepResult:
        return StepResult(launched.step_id, ())


def test_a_follower_is_not_stopped_by_the_collector_as_no_worker_is(tmp_path: Path) -> None:
    """A bug: its leader's collector was off, its own was not."""
    subject = Subject(
        model_dir="unread",
        dtype=DType.FP32,
        load_format=LoadFormat.DUMMY,
        max_context_tokens=64,
        block_size=16,
        kv_bytes=1,
        num_threads=1,
        parallelism=Parallelism(2, 1),
    )
    name, executor = subject.names[1], WhetherCollecting()
    here = (subject, name, str(tmp_path), executor, ScriptedExchange())
    with closing(LeaderBus(ranks.endpoint(str(tmp_path)), [name])) as bus:
        following = threading.Thread(target=ranks.follow, args=here)
        following.start()
        bus.gather(20)
        bus.send(StepPlan(step_id=1))
        bus.dismiss()
        following.join()
    assert executor.seen == [False]
    assert gc.isenabled()
