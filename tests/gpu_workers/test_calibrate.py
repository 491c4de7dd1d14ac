"""Profiling measures the grid that fits, finds where throughput saturates, and writes a table."""

import re
from pathlib import Path

import msgspec
import orjson
import pytest

from gpu_workers.calibrate import (
    SATURATION,
    Effort,
    PrefillPoint,
    ProfileTable,
    main,
    measure,
    saturation_tokens,
)
from gpu_workers.errors import ModelError
from ipc.vocabulary import DType
from tests.gpu_workers.checkpoints import llama_gqa
from tests.gpu_workers.driving import MAX_CONTEXT, Driver

QUICK = Effort(repeats=2, point_s=0.0, max_batch=4, max_context=MAX_CONTEXT)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama_gqa(tmp_path_factory.mktemp("profile") / "tiny")


def test_the_grid_covers_prompts_and_batches_up_to_the_context(model_dir: Path) -> None:
    driver, seen = Driver(model_dir), list[float]()
    table = measure(driver.executor, QUICK, report=lambda done, what: seen.append(done))
    single = [point.num_tokens for point in table.prefill if point.num_prompts == 1]
    assert single == [16, 32, 64, 128, 256]
    assert {point.num_prompts for point in table.prefill} == {1, 2, 4, 8}
    assert {(point.batch, point.context) for point in table.decode} == {
        (batch, context) for batch in (1, 2, 4) for context in (64, 256)
    }
    assert all(point.ms > 0 for point in (*table.prefill, *table.decode))
    assert table.saturation_tokens in single
    assert (table.model, table.dtype, table.block_size) == ("tiny", DType.FP32, 16)
    assert seen == sorted(seen)
    assert (seen[0], seen[-1]) == (0.0, 1.0)
    assert driver.executor.num_sequences == 0


def test_a_pool_that_holds_nothing_is_refused(model_dir: Path) -> None:
    effort = Effort(repeats=1, point_s=0.0, max_batch=1, max_context=8)
    with pytest.raises(ModelError, match="too small"):
        measure(Driver(model_dir).executor, effort)


def test_the_shortest_prompt_near_the_best_throughput_saturates() -> None:
    def point(tokens: int, tokens_per_s: float) -> PrefillPoint:
        return PrefillPoint(1, tokens, 1000 * tokens / tokens_per_s)

    just_enough = 1000 * SATURATION + 1
    rising = [point(16, 300), point(64, 700), point(128, just_enough), point(256, 1000)]
    assert saturation_tokens([*rising, point(512, 600)]) == 128
    assert saturation_tokens(rising[::-1]) == 128
    together = PrefillPoint(8, 64, 1000 * 8 * 64 / 5000)
    assert saturation_tokens([*rising, together]) == 128
    assert saturation_tokens([point(16, 5)]) == 16


def test_the_command_writes_a_table_that_reads_back(
    model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "profiles" / "tiny.json"
    arguments = ["--model", str(model_dir), "--quick", "--kv-gib", "0.01", "--max-batch", "1"]
    assert main([*arguments, "--load-format", "dummy", "--out", str(out)]) == 0
    table = msgspec.convert(orjson.loads(out.read_bytes()), ProfileTable)
    assert table.dtype is DType.BF16
    printed = capsys.readouterr().out
    assert f"L_m = {table.saturation_tokens} tokens" in printed
    assert "prefill" in printed
    assert "decode" in printed


def test_the_command_says_in_one_sentence_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--model", str(tmp_path / "nothing")]) == 1
    assert "cannot be read: No such file" in re.sub(r"\s+", " ", capsys.readouterr().err)


def test_help_teaches_what_is_measured_and_why(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    printed = capsys.readouterr().out
    for word in ("L_m", "--quick", "examples:", "taskset"):
        assert word in printed
