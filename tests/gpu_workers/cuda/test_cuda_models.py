"""The CUDA backend from end to end on CPU memory: what it draws is what the CPU backend draws."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_workers.cuda_switches import SWITCHES
from gpu_workers.errors import ModelError
from ipc.vocabulary import DType
from tests.gpu_workers.checkpoints import (
    CHECKPOINTS,
    NUM_TOKEN_IDS,
    llama_gqa,
    opt_pre_norm,
)
from tests.gpu_workers.cuda.rig import MAX_BATCH, CudaDriver, on_cpu
from tests.gpu_workers.driving import Driver, greedy
from tests.gpu_workers.rig import BLOCK_SIZE

PROMPT = list(b"Where the bee sucks, there suck I")
OTHERS = [list(b"in a cowslip's bell"), list(b"I lie"), list(b"there I couch when owls do cry")]


def llama_80(path: Path) -> Path:
    """Heads of 80 elements, which attention is not compiled for."""
    return llama_gqa(path, head_dim=80)


def opt_80(path: Path) -> Path:
    return opt_pre_norm(path, hidden_size=160)


MODELS: dict[str, Any] = {**CHECKPOINTS, "llama-80": llama_80, "opt-80": opt_80}


@pytest.fixture(scope="module", params=MODELS)
def model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = MODELS[request.param](tmp_path_factory.mktemp(request.param))
    return path


@pytest.fixture(scope="module")
def llama_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama_gqa(tmp_path_factory.mktemp("llama"))


@contextmanager
def both(model_dir: Path, **options: Any) -> Iterator[tuple[Driver, CudaDriver]]:
    yield (
        on_cpu(model_dir, num_token_ids=NUM_TOKEN_IDS),
        CudaDriver(model_dir, num_token_ids=NUM_TOKEN_IDS, **options),
    )


def test_a_prompt_whole_or_in_chunks_and_its_decode_draw_what_a_cpu_draws(model_dir: Path) -> None:
    with both(model_dir) as (cpu, gpu):
        expected = cpu.generate(PROMPT, 10)
        assert gpu.generate(PROMPT, 10) == expected
        assert gpu.generate(PROMPT, 10, chunk=BLOCK_SIZE) == expected
        assert gpu.generate(PROMPT, 10, chunk=7) == expected
        assert gpu.device.num_replays > 0


def test_the_pool_holds_what_a_cpus_holds_with_heads_padded_by_zeros(model_dir: Path) -> None:
    """Keys before values, head before token: what other workers pull is laid out alike."""
    with both(model_dir) as (cpu, gpu):
        pools = []
        for driver in (cpu, gpu):
            sequence = driver.add(PROMPT, greedy())
            driver.prefill(sequence, len(PROMPT), chunk=13)
            pools.append(driver.pool.pool[driver.blocks[sequence][:-1]].float())
        width = gpu.config.head_dim
        assert torch.allclose(pools[1][..., :width], pools[0], atol=0.05)
        assert not pools[1][..., width:].any()


def mixed(driver: Driver) -> list[list[int]]:
    """Decodes beside a chunk that has a past, a fresh prompt, and a chunk of one token."""
    first = driver.add(PROMPT, greedy())
    drawn = {first: [*driver.prefill(first, len(PROMPT)).token_ids]}
    chunked, fresh, single = (driver.add(prompt, greedy()) for prompt in OTHERS)
    driver.step((chunked, 5, False))
    results = driver.step(
        (chunked, len(OTHERS[0]) - 5, True),
        (first, 1, True),
        (fresh, len(OTHERS[1]), True),
        (single, 1, False),
    )
    results |= driver.step((single, len(OTHERS[2]) - 1, True), (chunked, 1, True), (fresh, 1, True))
    for _ in range(4):
        for sequence, row in results.items():
            drawn.setdefault(sequence, []).extend(row.token_ids)
        results = driver.step(*((sequence, 1, True) for sequence in drawn))
    return [drawn[sequence] for sequence in (first, chunked, fresh, single)]


def test_decodes_chunks_and_prompts_share_a_step(model_dir: Path) -> None:
    with both(model_dir) as (cpu, gpu):
        assert mixed(gpu) == mixed(cpu)


@pytest.mark.parametrize("num_rows", [1, 2, 3, 5, 8, 9])
def test_rows_of_padding_change_nothing_in_a_graphs_step(llama_dir: Path, num_rows: int) -> None:
    with both(llama_dir) as (cpu, gpu):
        drawn = []
        for driver in (cpu, gpu):
            sequences = [driver.add(PROMPT[: 4 + 3 * n], greedy()) for n in range(num_rows)]
            prompts = [(s, 4 + 3 * n, True) for n, s in enumerate(sequences)]
            steps = [driver.step(*prompts)]
            steps += [driver.step(*((s, 1, True) for s in sequences)) for _ in range(4)]
            drawn.append([{s: row.token_ids for s, row in step.items()} for step in steps])
        assert drawn[0] == drawn[1]
        assert gpu.device.num_replays == 4


def test_more_rows_than_the_largest_graph_has_run_without_one(llama_dir: Path) -> None:
    with both(llama_dir, max_batch=2) as (cpu, gpu):
        for driver in (cpu, gpu):
            sequences = [driver.add(PROMPT[:5], greedy()) for _ in range(3)]
            driver.step(*((s, 5, True) for s in sequences))
        rows = [driver.step(*((s, 1, True) for s in sequences)) for driver in (cpu, gpu)]
        assert [row.token_ids for row in rows[0].values()] == [
            row.token_ids for row in rows[1].values()
        ]
        assert gpu.device.num_replays == 0


def test_graphs_are_captured_at_the_start_and_say_so(llama_dir: Path) -> None:
    with both(llama_dir) as (_, gpu):
        assert gpu.captured == [0.2, 0.4, 0.6, 0.8, 1.0]  # of 1, 2, 4, 8 and the largest batch
        assert MAX_BATCH == 9


def test_the_spare_block_is_all_that_padding_touches(llama_dir: Path) -> None:
    with both(llama_dir) as (_, gpu):
        sequence = gpu.add(PROMPT[:5], greedy())
        gpu.prefill(sequence, 5)
        others = [block for block in range(len(gpu.pool.pool)) if block not in gpu.blocks[sequence]]
        gpu.pool.pool[others] = 3.0
        for _ in range(3):
            gpu.step((sequence, 1, True))
        touched = [block for block in others if bool((gpu.pool.pool[block] != 3.0).any())]
        assert set(touched) <= {len(gpu.pool.pool) - 1}


def sampled(**changes: object) -> Any:
    return greedy(temperature=1.1, top_p=0.9, seed=5, **changes)


def in_turns(driver: Driver) -> dict[int, list[int]]:
    """Steps that are collected before the next is launched."""
    first, second = (driver.add(prompt, sampled()) for prompt in (PROMPT, OTHERS[0]))
    results = driver.step((first, len(PROMPT), True), (second, len(OTHERS[0]), True))
    drawn = {sequence: [*row.token_ids] for sequence, row in results.items()}
    for _ in range(8):
        for sequence, row in driver.step((first, 1, True), (second, 1, True)).items():
            drawn[sequence] += row.token_ids
    return drawn


def overlapped(driver: CudaDriver, *, graphed: bool = True) -> dict[int, list[int]]:
    """The same with each step launched before the one before it is collected."""
    first, second = (driver.add(prompt, sampled()) for prompt in (PROMPT, OTHERS[0]))
    in_flight = [driver.launch((first, len(PROMPT), True), (second, len(OTHERS[0]), True))]
    drawn: dict[int, list[int]] = {first: [], second: []}
    for turn in range(9):
        if turn < 8:
            in_flight.append(driver.launch((first, 1, True), (second, 1, True)))
        for sequence, row in driver.collect(in_flight.pop(0)).items():
            drawn[sequence] += row.token_ids
    assert bool(driver.device.num_replays) is graphed
    return drawn


@pytest.mark.parametrize("max_batch", [1, 9])
def test_a_step_takes_tokens_that_the_one_before_it_is_still_drawing(
    llama_dir: Path, max_batch: int
) -> None:
    with both(llama_dir, max_batch=max_batch) as (cpu, gpu):
        assert overlapped(gpu, graphed=max_batch > 1) == in_turns(cpu)


def test_a_line_of_the_table_is_soon_another_sequences(llama_dir: Path) -> None:
    with both(llama_dir) as (cpu, gpu):
        expected = cpu.generate(OTHERS[0], 4, sampled())
        first = gpu.add(PROMPT, sampled())
        gpu.prefill(first, len(PROMPT))
        late = gpu.launch((first, 1, True))
        gpu.remove(first)
        second = gpu.add(OTHERS[0], sampled())
        steps = [gpu.launch((second, len(OTHERS[0]), True))]
        steps += [gpu.launch((second, 1, True))]
        gpu.collect(late)
        drawn = [gpu.collect(step)[second].token_ids[0] for step in steps]
        drawn += [gpu.step((second, 1, True))[second].token_ids[0] for _ in range(2)]
        assert drawn == expected


def test_log_probabilities_come_back_with_the_step(llama_dir: Path) -> None:
    with both(llama_dir) as (cpu, gpu):
        rows = []
        for driver in (cpu, gpu):
            sequence = driver.add(PROMPT, greedy(logprobs=2), prompt_logprobs=3)
            row = driver.prefill(sequence, len(PROMPT), chunk=9)
            later = driver.step((sequence, 1, True))[sequence]
            rows.append([*(row.prompt_logprobs or ())[1:], *(row.logprobs or ())])
            rows[-1] += later.logprobs or ()
        for ours, theirs in zip(*rows, strict=True):
            assert ours is not None
            assert theirs is not None
            assert ours.token_id == theirs.token_id
            assert ours.logprob == pytest.approx(theirs.logprob, abs=0.05)
            assert len(ours.top) == len(theirs.top)


def test_every_choice_of_a_prompt_draws_its_own_token(llama_dir: Path) -> None:
    with both(llama_dir) as (_, gpu):
        parent = gpu.add(PROMPT, sampled(), choices=(0, 1, 2, 5))
        together = gpu.prefill(parent, len(PROMPT)).token_ids
        alone: list[int] = []
        for choice in (0, 1, 2, 5):
            sequence = gpu.add(PROMPT, sampled(), choices=(choice,))
            alone += gpu.prefill(sequence, len(PROMPT)).token_ids
        assert list(together) == alone
        assert len(set(together)) > 1


@pytest.mark.parametrize("used", ["", "rope", "append", "silu", "norm", "rope,append,silu,norm"])
def test_each_pass_beside_attention_is_the_librarys_or_torchs(
    llama_dir: Path, used: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SWITCHES, used)
    with both(llama_dir) as (cpu, gpu):
        assert gpu.generate(PROMPT, 6) == cpu.generate(PROMPT, 6)
        calls = {
            "rope": "apply_rope_with_cos_sin_cache_inplace",
            "append": "append_paged_kv_cache",
            "silu": "silu_and_mul",
            "norm": "fused_add_rmsnorm",
        }
        names = {name for name, call in calls.items() if gpu.flashinfer.calls.get(call)}
        assert names == {name for name in used.split(",") if name}


def test_an_unknown_switch_is_named(llama_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCHES, "rope,gate")
    with pytest.raises(ModelError, match="names gate; there are append, norm, rope, silu"):
        CudaDriver(llama_dir)


def test_bfloat16_is_computed_too(llama_dir: Path) -> None:
    cpu = on_cpu(llama_dir, DType.BF16, NUM_TOKEN_IDS)
    gpu = CudaDriver(llama_dir, dtype=DType.BF16, num_token_ids=NUM_TOKEN_IDS)
    assert gpu.generate(PROMPT, 4) == cpu.generate(PROMPT, 4)
