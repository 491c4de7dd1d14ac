"""`distserve profile` from the executor up: a tiny model, and seconds too few for much."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
import orjson
import pytest
import torch

from gpu_workers.arguments import EXIT_USAGE
from gpu_workers.cpu_exchange import CpuExchange
from gpu_workers.engine import EngineSpec, build_executor, pool_layout
from gpu_workers.errors import ModelError
from gpu_workers.executor import Executor
from gpu_workers.models.config import read_config
from gpu_workers.profiling.command import main
from gpu_workers.profiling.measure import Effort, measure
from gpu_workers.profiling.places import CpuPlace
from gpu_workers.profiling.ranks import Rank
from ipc.profile_table import TABLE_VERSION, ProfileTable
from ipc.vocabulary import DeviceKind, DType
from tests.gpu_workers.checkpoints import llama_gqa

MAX_CONTEXT = 256
BRIEF = Effort(
    max_context=MAX_CONTEXT,
    max_batch=4,
    max_step_tokens=MAX_CONTEXT,
    total_s=0.1,
    knee_s=0.05,
    visit_s=0.0,
    max_rounds=2,
)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama_gqa(tmp_path_factory.mktemp("profile") / "tiny")


@pytest.fixture(scope="module")
def engine(model_dir: Path) -> Iterator[tuple[Executor, Rank]]:
    torch.set_num_threads(1)
    config = read_config(model_dir)
    num_bytes = 4096 * config.kv_bytes_per_token(DType.FP32)
    layout = pool_layout(config, dtype=DType.FP32, block_size=16, kv_bytes=num_bytes)
    exchange = CpuExchange(layout, "profiled")
    spec = EngineSpec(model_dir=str(model_dir), dtype=DType.FP32, max_context_tokens=MAX_CONTEXT)
    executor = build_executor(config, spec, exchange)
    yield executor, Rank(executor, exchange, CpuPlace(), layout.num_blocks)
    os.close(exchange.descriptor)


def test_the_table_covers_the_grid_and_says_what_was_measured(
    engine: tuple[Executor, Rank],
) -> None:
    executor, _ = engine
    table = measure(*engine, BRIEF)
    assert [p.num_tokens for p in table.prefill if p.num_prompts == 1] == [16, 32, 64, 128, 256]
    assert {point.num_prompts for point in table.prefill} == {1, 2, 4, 8}
    assert {(point.batch, point.context) for point in table.decode} == {
        (batch, context) for batch in (1, 2, 4) for context in (64, 256)
    }
    chunks = {(point.num_new, point.num_cached, point.batch) for point in table.mixed}
    assert chunks == {(32, 0, 1), (128, 0, 1)}
    assert [point.num_tokens for point in table.transfer] == [16, 64, 256]
    measured = (*table.prefill, *table.decode, *table.mixed, *table.transfer)
    assert all(point.ms > 0 for point in measured)
    assert 16 <= table.saturation_tokens <= 256
    assert (table.model, table.dtype, table.block_size) == ("tiny", DType.FP32, 16)
    assert (table.version, table.tp, table.pp) == (TABLE_VERSION, 1, 1)
    assert (table.device_kind, table.pull_path) == (DeviceKind.CPU, "memory")
    config = executor.model.config
    assert table.kv_bytes_per_token == 8 * config.num_layers * config.num_kv_heads * config.head_dim


def test_more_tokens_take_longer(engine: tuple[Executor, Rank]) -> None:
    table = measure(*engine, msgspec.structs.replace(BRIEF, total_s=1.0, max_rounds=9))
    prefill = {(p.num_prompts, p.num_tokens): p.ms for p in table.prefill}
    assert prefill[1, 256] > prefill[1, 16]
    (least, *_, most) = sorted(table.transfer, key=lambda point: point.num_tokens)
    assert most.ms > least.ms


def test_the_executor_is_left_as_it_was(engine: tuple[Executor, Rank]) -> None:
    executor, rank = engine
    seen = list[float]()
    measure(*engine, BRIEF, report=lambda done, what: seen.append(done))
    assert seen == sorted(seen)
    assert (round(seen[0], 1), seen[-1]) == (0.0, 1.0)
    assert executor.num_sequences == 0
    assert rank.exchange.finished() == []
    assert not rank.exchange.knows("peer", 1)


def test_a_pool_that_holds_nothing_is_refused(engine: tuple[Executor, Rank]) -> None:
    with pytest.raises(ModelError, match="too small"):
        measure(*engine, msgspec.structs.replace(BRIEF, max_context=8))


def test_the_command_writes_a_table_that_reads_back(
    model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "profiles" / "tiny.json"
    arguments = ["--model", str(model_dir), "--quick", "--kv-gib", "0.01", "--seconds", "0.2"]
    assert main([*arguments, "--load-format", "dummy", "--out", str(out)]) == 0
    table = msgspec.convert(orjson.loads(out.read_bytes()), ProfileTable)
    assert table.dtype is DType.BF16
    printed = capsys.readouterr().out
    assert f"L_m = {table.saturation_tokens} tokens" in printed
    for title in ("prefill", "decode", "a chunk beside decodes", "pull from another pool"):
        assert title in printed


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--model", "nothing"], "cannot be read: No such file"),
        (
            ["--model", "nothing", "--out", "/dev/null/table.json"],
            "/dev/null/table.json cannot be written: File exists",
        ),
    ],
)
def test_the_command_says_in_one_sentence_what_is_wrong(
    arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 1
    assert reason in re.sub(r"\s+", " ", capsys.readouterr().err)


@pytest.mark.parametrize(
    "wrong",
    [
        *("--block-size=0", "--threads=-1", "--threads=100000", "--seconds=nan", "--kv-gib=x"),
        *("--dtype=int8", "--threads=x", "--load-format=pickle"),
        *("--device=gpu", "--pull-from=-1", "--gpu-memory-utilization=1.5"),
    ],
)
def test_a_figure_that_cannot_be_is_refused_at_the_door(
    wrong: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match=str(EXIT_USAGE)):
        main(["--model", "nothing", wrong])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"distserve profile: argument {wrong.split('=')[0]}: ")


def test_help_teaches_what_is_measured_and_why(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    printed = capsys.readouterr().out
    for word in ("L_m", "--quick", "rounds", "pulls", "examples:", "taskset", "cuda:4"):
        assert word in printed
