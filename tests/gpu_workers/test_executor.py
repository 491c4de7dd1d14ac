"""The executor does what plans say, in their order, and keeps its table as they say."""

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from gpu_workers.batch import build_batch
from gpu_workers.collectives import Alone
from gpu_workers.engine import EngineSpec, PrivatePool, build_executor, build_kernels, open_weights
from gpu_workers.models.layers import Loader
from gpu_workers.models.registry import build_model
from gpu_workers.sequence_table import SequenceTable
from gpu_workers.step_plan import BlockCopy, NewBlocks, NewSequence, Pull, Row, StepPlan
from ipc.kv_layout import RankLayout
from ipc.vocabulary import DType, KVHandle, Parallelism, SamplingParams
from tests.gpu_workers.checkpoints import CHECKPOINTS, NUM_TOKEN_IDS, llama_gqa
from tests.gpu_workers.driving import MAX_CONTEXT, Driver, greedy
from tests.gpu_workers.test_models import load_reference

PROMPT = [72, 101, 108, 108, 111, 44, 32, 119, 111, 114, 108, 100, 33, 10, 65, 66, 67, 68, 69]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama_gqa(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def reference(model_dir: Path) -> PreTrainedModel:
    return load_reference(model_dir)


@pytest.fixture
def driver(model_dir: Path) -> Driver:
    return Driver(model_dir, num_token_ids=NUM_TOKEN_IDS)


def sampled(**changes: object) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 64, "seed": 11, "temperature": 1.2, **changes})


def test_results_come_in_the_plans_order_and_only_for_rows_that_draw(driver: Driver) -> None:
    alone = [driver.generate(PROMPT[:n], 1) for n in (9, 4)]
    long, quiet, short = (driver.add(PROMPT[:n], greedy()) for n in (9, 12, 4))
    results = driver.step((long, 9, True), (quiet, 12, False), (short, 4, True))
    assert list(results) == [long, short]
    assert [list(row.token_ids) for row in results.values()] == alone


def test_a_token_that_nobody_has_told_yet_is_not_computed_with(driver: Driver) -> None:
    """A device would have it; here a step is collected before the next one of its sequence."""
    blocks = (NewBlocks(1, (0,)),)
    added = (NewSequence(1, (0,), tuple(PROMPT[:5]), (), 0, greedy()),)
    driver.executor.launch(StepPlan(step_id=1, added=added, blocks=blocks, rows=(Row(1, 5, True),)))
    with pytest.raises(AssertionError, match="no plan has told"):
        driver.executor.launch(StepPlan(step_id=2, rows=(Row(1, 1, True),)))


def test_every_choice_of_a_prompt_draws_its_own_token(driver: Driver) -> None:
    shared = driver.add(PROMPT, sampled(), choices=(0, 1, 2, 5))
    together = driver.prefill(shared, len(PROMPT)).token_ids
    alone = []
    for choice in (0, 1, 2, 5):
        sequence = driver.add(PROMPT, sampled(), choices=(choice,))
        alone += driver.prefill(sequence, len(PROMPT)).token_ids
    assert list(together) == alone
    assert len(set(together)) > 1


def test_seeded_text_is_the_same_alone_in_a_batch_and_after_a_second_prefill_F16_F17_F22(
    driver: Driver,
) -> None:
    sampling = sampled(top_p=0.95, frequency_penalty=0.3)
    alone = driver.generate(PROMPT, 12, sampling)
    driver.prefill(other := driver.add(PROMPT[:7], sampled(seed=4)), 7)
    mine = driver.add(PROMPT, sampling)
    batched = [*driver.prefill(mine, len(PROMPT), chunk=5).token_ids]
    for _ in range(5):
        batched += driver.step((other, 1, True), (mine, 1, True))[mine].token_ids
    driver.remove(mine)
    again = driver.add(PROMPT, sampling, output=batched)
    batched += driver.prefill(again, len(PROMPT) + 6).token_ids
    for _ in range(5):
        batched += driver.step((again, 1, True), (other, 1, True))[again].token_ids
    assert batched == alone


def test_a_removed_sequence_may_come_back_in_the_same_plan(driver: Driver) -> None:
    def start(step_id: int, removed: tuple[int, ...], prompt: list[int]) -> int:
        plan = StepPlan(
            step_id=step_id,
            removed=removed,
            added=(NewSequence(7, (0,), tuple(prompt), (), 0, greedy()),),
            blocks=(NewBlocks(7, (3, 1)),),
            rows=(Row(7, len(prompt), True),),
        )
        return driver.executor.collect(driver.executor.launch(plan)).rows[0].token_ids[0]

    expected = [driver.generate(prompt, 1)[0] for prompt in (PROMPT, PROMPT[:6])]
    driver.step()
    assert [start(0, (), PROMPT), start(1, (7,), PROMPT[:6])] == expected
    driver.executor.launch(StepPlan(step_id=2, removed=(7,)))
    assert driver.executor.num_sequences == 0


def test_a_forked_choice_goes_on_from_shared_blocks_and_a_copy_of_the_partial_one(
    driver: Driver,
) -> None:
    expected = driver.generate(PROMPT, 6)
    parent = driver.add(PROMPT, greedy(), choices=(0, 1))
    first = driver.prefill(parent, len(PROMPT)).token_ids[0]
    full, partial = driver.blocks[parent]
    fresh, growth = driver.free.pop(), driver.free.pop()
    plan = StepPlan(
        step_id=50,
        removed=(parent,),
        added=(NewSequence(90, (1,), tuple(PROMPT), (first,), len(PROMPT), greedy()),),
        blocks=(NewBlocks(90, (full, fresh, growth)),),
        copies=(BlockCopy(partial, fresh),),
        rows=(Row(90, 1, True),),
    )
    drawn = [first, *driver.executor.collect(driver.executor.launch(plan)).rows[0].token_ids]
    driver.pool.pool[partial].fill_(9.0)
    for step_id in range(51, 55):
        plan = StepPlan(step_id=step_id, rows=(Row(90, 1, True),))
        drawn += driver.executor.collect(driver.executor.launch(plan)).rows[0].token_ids
    assert drawn == expected


class Pulling(PrivatePool):
    """An exchange whose pulls copy from another pool of this process, at once."""

    source: torch.Tensor

    def begin(self, pull: Pull) -> None:
        self.pool[list(pull.into)] = self.source[list(pull.handle.block_ids)]


def test_pulled_blocks_are_there_before_the_rows_run(driver: Driver, model_dir: Path) -> None:
    expected = driver.generate(PROMPT, 5)
    prefilled = driver.add(PROMPT, greedy())
    first = driver.prefill(prefilled, len(PROMPT)).token_ids[0]
    decoding = Driver(model_dir)
    exchange = Pulling(decoding.layout)
    exchange.source = driver.pool.pool
    spec = EngineSpec(model_dir=str(model_dir), dtype=DType.FP32, max_context_tokens=MAX_CONTEXT)
    executor = build_executor(decoding.config, spec, exchange)
    blocks = tuple(driver.blocks[prefilled])
    plan = StepPlan(
        step_id=0,
        added=(NewSequence(1, (0,), tuple(PROMPT), (first,), len(PROMPT), greedy()),),
        blocks=(NewBlocks(1, (8, 2)),),
        pulls=(Pull(KVHandle("prefill-0", 1, 4, blocks, len(PROMPT)), (8, 2)),),
        rows=(Row(1, 1, True),),
    )
    drawn = [first, *executor.collect(executor.launch(plan)).rows[0].token_ids]
    for step_id in range(1, 4):
        plan = StepPlan(step_id=step_id, rows=(Row(1, 1, True),))
        drawn += executor.collect(executor.launch(plan)).rows[0].token_ids
    assert drawn == expected


class Noting(PrivatePool):
    """An exchange that notes what it is asked for."""

    def __init__(self, layout: RankLayout) -> None:
        super().__init__(layout)
        self.asked: list[object] = []

    def unmap_instance(self, instance: str, epoch: int) -> None:
        self.asked.append((instance, epoch))

    def begin(self, pull: Pull) -> None:
        self.asked.append(pull)


def test_pools_are_forgotten_in_the_order_of_plans_before_a_plans_own_pulls(
    driver: Driver, model_dir: Path
) -> None:
    exchange = Noting(driver.layout)
    spec = EngineSpec(model_dir=str(model_dir), dtype=DType.FP32, max_context_tokens=MAX_CONTEXT)
    executor = build_executor(driver.config, spec, exchange)
    first, second = (Pull(KVHandle("prefill-0", epoch, 4, (1,), 9), (2,)) for epoch in (1, 2))
    executor.launch(StepPlan(step_id=0, pulls=(first,)))
    executor.launch(StepPlan(step_id=1, unmapped=(("prefill-0", 1),), pulls=(second,)))
    assert exchange.asked == [first, ("prefill-0", 1), second]


@pytest.mark.parametrize("chunk", [None, 4, 7])
def test_prompt_logprobs_come_with_the_last_chunk_and_equal_the_references_F8(
    driver: Driver, reference: PreTrainedModel, chunk: int | None
) -> None:
    sequence = driver.add(PROMPT, greedy(logprobs=2), prompt_logprobs=3)
    row = driver.prefill(sequence, len(PROMPT), chunk=chunk)
    with torch.no_grad():
        logits = reference(torch.tensor([PROMPT])).logits[0, :, :NUM_TOKEN_IDS]
    expected = logits.log_softmax(-1)
    assert row.prompt_logprobs is not None
    assert row.prompt_logprobs[0] is None
    assert len(row.prompt_logprobs) == len(PROMPT)
    for position, scored in enumerate(row.prompt_logprobs[1:]):
        assert scored is not None
        assert scored.token_id == PROMPT[position + 1]
        assert scored.logprob == pytest.approx(float(expected[position, scored.token_id]), abs=1e-4)
        top = expected[position].topk(3)
        assert [token_id for token_id, _ in scored.top] == top.indices.tolist()
    assert row.logprobs is not None
    assert row.logprobs[0].token_id == row.token_ids[0]
    assert row.logprobs[0].logprob == pytest.approx(float(expected[-1].max()), abs=1e-4)
    assert driver.step((sequence, 1, True))[sequence].prompt_logprobs is None


def test_prompts_that_want_logprobs_share_a_step_with_others(driver: Driver) -> None:
    expected = driver.generate(PROMPT[:8], 2)
    plain = driver.add(PROMPT[:8], greedy())
    drawn = [*driver.prefill(plain, 8).token_ids]
    first = driver.add(PROMPT[:6], greedy(), prompt_logprobs=0)
    second = driver.add(PROMPT[:9], greedy(), prompt_logprobs=0)
    results = driver.step((second, 9, True), (plain, 1, True), (first, 6, True))
    alone = driver.add(PROMPT[:9], greedy(), prompt_logprobs=0)
    scored = driver.prefill(alone, 9).prompt_logprobs
    assert [*drawn, *results[plain].token_ids] == expected
    assert results[plain].prompt_logprobs is None
    for mine, theirs in ((results[second], scored), (results[first], (scored or ())[:6])):
        pairs = zip(mine.prompt_logprobs or (), theirs or (), strict=True)
        for ours, other in list(pairs)[1:]:
            assert ours is not None
            assert other is not None
            assert ours.token_id == other.token_id
            assert ours.logprob == pytest.approx(other.logprob, abs=1e-4)


def test_a_table_grows_beyond_its_first_lines(driver: Driver) -> None:
    expected = driver.generate(PROMPT[:3], 3)
    sequences = [driver.add(PROMPT[:3], greedy()) for _ in range(100)]
    drawn = driver.step(*((sequence, 3, True) for sequence in sequences))
    tokens = {sequence: [*drawn[sequence].token_ids] for sequence in sequences}
    for _ in range(2):
        drawn = driver.step(*((sequence, 1, True) for sequence in sequences))
        for sequence in sequences:
            tokens[sequence] += drawn[sequence].token_ids
    assert all(tokens[sequence] == expected for sequence in sequences)
    assert driver.executor.num_sequences == 100


def test_blocks_that_held_other_tokens_do_not_show_through(driver: Driver) -> None:
    expected = driver.generate(PROMPT, 4)
    driver.pool.pool.fill_(1e4)
    assert driver.generate(PROMPT, 4) == expected
    assert driver.generate(PROMPT, 4, chunk=3) == expected


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_two_stages_compute_what_one_does(name: str, tmp_path: Path) -> None:
    whole = Driver(CHECKPOINTS[name](tmp_path))
    config, layout = whole.config, whole.layout
    spec = EngineSpec(model_dir=str(tmp_path), dtype=DType.FP32, max_context_tokens=MAX_CONTEXT)
    table = SequenceTable(block_size=16, max_tokens=MAX_CONTEXT)
    added = (NewSequence(1, (0,), tuple(PROMPT), (), 0, greedy()),)
    table.apply(StepPlan(step_id=0, added=added, blocks=(NewBlocks(1, (4, 2)),)))
    batch = build_batch(table, [Row(1, len(PROMPT), True)])
    hidden = None
    with torch.inference_mode():
        for stage in (0, 1):
            pool = torch.zeros((layout.num_blocks, config.num_kv_heads, 1, *layout.shape[3:]))
            kernels = build_kernels(config, pool, MAX_CONTEXT)
            weights = open_weights(config, spec, lambda fraction: None)
            shard = config.shard(Parallelism(pp=2), stage, 0)
            model = build_model(Loader(config, kernels, weights, shard, Alone()), kernels)
            kernels.prepare(batch)
            hidden = model.forward(batch, hidden)
        assert hidden is not None
        logits = model.logits(hidden)
        assert logits is not None
        token = int(logits.argmax())
    assert [token] == whole.generate(PROMPT, 1)
