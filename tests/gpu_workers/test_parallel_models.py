"""An instance of any shape computes what one worker does, and what transformers does."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from gpu_workers.errors import ModelError
from gpu_workers.models.config import read_config
from gpu_workers.step_plan import RowResult
from ipc.vocabulary import DType, Parallelism, SamplingParams, TokenLogprobs
from tests.gpu_workers.checkpoints import CHECKPOINTS, llama_gqa
from tests.gpu_workers.divisible import divisible
from tests.gpu_workers.driving import Driver, greedy
from tests.gpu_workers.group_driver import DIVIDED, GroupDriver, driving, shape_name
from tests.gpu_workers.test_models import load_reference, reference_greedy, worst_gap

LENGTHS = (1, 7, 33, 40)
NUM_NEW = 6
BF16_TOLERANCE = 0.10  # standard deviations of a row's logits, as for one worker


@pytest.fixture(autouse=True)
def one_thread_each() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=CHECKPOINTS)
def model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return divisible(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return divisible("llama-gqa", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 256, (n,), generator=generator).tolist() for n in LENGTHS]


@pytest.fixture(scope="module")
def expected(model_dir: Path, prompts: list[list[int]]) -> list[list[int]]:
    reference = load_reference(model_dir)
    return [reference_greedy(reference, prompt, NUM_NEW) for prompt in prompts]


def run_together(driver: Driver, prompts: list[list[int]]) -> list[list[int]]:
    """Prompts, a chunk and decodes in common steps: the last prompt comes in three parts."""
    sequences = [driver.add(prompt, greedy()) for prompt in prompts]
    *early, late = sequences
    drawn: dict[int, list[int]] = {sequence: [] for sequence in sequences}
    rows = [(s, len(p), True) for s, p in zip(early, prompts, strict=False)]
    chunks = [(late, 9, False), (late, 20, False), (late, len(prompts[-1]) - 29, True)]
    for step in range(NUM_NEW + 2):
        late_row = chunks[step] if step < len(chunks) else (late, 1, True)
        for sequence, row in driver.step(*rows[:2], late_row, *rows[2:]).items():
            drawn[sequence] += row.token_ids
        rows = [(sequence, 1, True) for sequence in early]
    return [drawn[sequence][:NUM_NEW] for sequence in sequences]


@pytest.mark.parametrize("shape", DIVIDED, ids=shape_name)
def test_greedy_tokens_equal_the_references(
    model_dir: Path, shape: Parallelism, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    with driving(model_dir, shape) as driver:
        assert run_together(driver, prompts) == expected


@pytest.mark.parametrize("shape", DIVIDED, ids=shape_name)
def test_sampling_rules_and_log_probabilities_are_those_of_one_worker(
    llama: Path, shape: Parallelism, prompts: list[list[int]]
) -> None:
    with driving(llama, shape) as driver:
        alone, together = sampled_run(Driver(llama), prompts), sampled_run(driver, prompts)
    assert [row.token_ids for row in together] == [row.token_ids for row in alone]
    for ours, theirs in zip(together, alone, strict=True):
        assert numbers(ours.logprobs) == pytest.approx(numbers(theirs.logprobs), abs=1e-4)
        ours_prompt, theirs_prompt = numbers(ours.prompt_logprobs), numbers(theirs.prompt_logprobs)
        assert ours_prompt == pytest.approx(theirs_prompt, abs=1e-4)


def sampled_run(driver: Driver, prompts: list[list[int]]) -> list[RowResult]:
    """Three choices of a scored prompt, in chunks; then a penalised, seeded text beside it."""
    shared = SamplingParams(max_tokens=64, seed=5, temperature=1.3, logprobs=2)
    penalised = SamplingParams(
        max_tokens=64,
        seed=9,
        temperature=0.8,
        top_p=0.9,
        repetition_penalty=1.3,
        frequency_penalty=0.4,
        logprobs=0,
    )
    scored = driver.add(prompts[2], shared, choices=(0, 1, 4), prompt_logprobs=2)
    text = driver.add(prompts[1], penalised)
    assert driver.step((scored, 13, False)) == {}
    rows = [*driver.step((text, LENGTHS[1], True), (scored, 20, True)).values()]
    for _ in range(6):
        rows += driver.step((text, 1, True)).values()
    return rows


def numbers(scored: tuple[TokenLogprobs | None, ...] | None) -> list[float]:
    return [
        value
        for token in scored or ()
        if token is not None
        for value in (token.logprob, *(logprob for _, logprob in token.top))
    ]


@pytest.mark.parametrize("shape", [Parallelism(2, 1), Parallelism(4, 2)], ids=shape_name)
def test_bf16_tokens_pass_teacher_forcing(
    llama: Path, shape: Parallelism, prompts: list[list[int]]
) -> None:
    reference = load_reference(llama)
    with driving(llama, shape, dtype=DType.BF16) as driver:
        for prompt, tokens in zip(prompts, run_together(driver, prompts), strict=True):
            assert worst_gap(reference, prompt, tokens) < BF16_TOLERANCE


def test_every_rank_keeps_the_same_table_and_no_more_than_its_part_of_the_cache(
    llama: Path, prompts: list[list[int]]
) -> None:
    with driving(llama, Parallelism(2, 2)) as driver:
        sequence = driver.add(prompts[2], greedy())
        driver.prefill(sequence, LENGTHS[2])
        assert [rank.num_sequences for rank in driver.group.ranks] == [1] * 4
        assert_same_cache(driver, Driver(llama), prompts[2])
        driver.remove(sequence)
        driver.step()
        assert [rank.num_sequences for rank in driver.group.ranks] == [0] * 4


def assert_same_cache(driver: GroupDriver, alone: Driver, prompt: list[int]) -> None:
    """What the ranks have written is that part of what one worker writes."""
    sequence = alone.add(prompt, greedy())
    alone.prefill(sequence, len(prompt))
    whole = alone.pool.pool[alone.blocks[sequence]]
    for rank in driver.group.ranks:
        shard = rank.model.shard
        heads, layers = shard.kv_heads, shard.layers
        part = whole[:, heads.start : heads.stop, layers.start : layers.stop]
        ours = rank.exchange.pool[driver.blocks[sequence]]
        assert ours.shape == part.shape
        torch.testing.assert_close(ours[0], part[0], atol=1e-4, rtol=1e-4)


def test_a_shape_that_does_not_divide_the_model_is_refused(tmp_path: Path) -> None:
    config = read_config(llama_gqa(tmp_path))
    for shape, reason in (
        (Parallelism(tp=4), "tp 4 does not divide the 6 attention heads"),
        (Parallelism(pp=3), "pp 3 is more than the 2 layers"),
    ):
        with pytest.raises(ModelError, match=reason):
            config.shard(shape, 0, 0)
