"""Crowds before an instance of several GPUs: what each gets is what one CPU draws for it alone, and
the ranks of a stage never ask their devices for different sums.

In fp32, which the fake kernels take here and real ones do not: no token is a matter of rounding.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_workers.batch import Batch
from gpu_workers.cuda_graphs import DecodeGraphs, Replayed, graph_sizes
from gpu_workers.cuda_runner import CudaRunner
from gpu_workers.nccl_collectives import NcclCollectives
from gpu_workers.step_plan import NewBlocks, NewSequence, Pull, Row, StepPlan
from ipc.vocabulary import DType, KVHandle, Parallelism
from tests.gpu_workers.cuda import fake_flashinfer, flashinfer_checks
from tests.gpu_workers.cuda.parallel_rig import MAX_BATCH, ParallelRig, run_crowd
from tests.gpu_workers.cuda.played_instance import PlayedRanks, played
from tests.gpu_workers.divisible import divisible
from tests.gpu_workers.driving import Driver, greedy
from tests.gpu_workers.group_driver import shape_name
from tests.gpu_workers.rig import BLOCK_SIZE

SHAPES = [Parallelism(2, 1), Parallelism(1, 2), Parallelism(2, 2)]
NUM_REQUESTS = 10


@pytest.fixture(scope="module", autouse=True)
def kernels_in_fp32() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for module in (fake_flashinfer, flashinfer_checks):
            patch.setattr(module, "require_16_bit_type", lambda dtype: None)
        yield


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return divisible("llama-gqa", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def cpu(model_dir: Path) -> Driver:
    return Driver(model_dir, block_size=BLOCK_SIZE)


@contextmanager
def instance(model_dir: Path, shape: Parallelism) -> Iterator[PlayedRanks]:
    how = {"dtype": DType.FP32, "block_size": BLOCK_SIZE, "max_batch": MAX_BATCH}
    with played(model_dir, shape, **how) as ranks:  # type: ignore[arg-type]
        yield ranks


@pytest.fixture(scope="module", params=SHAPES, ids=shape_name)
def ranks(model_dir: Path, request: pytest.FixtureRequest) -> Iterator[PlayedRanks]:
    with instance(model_dir, request.param) as ranks:
        yield ranks


def check_agreement(ranks: PlayedRanks) -> None:
    """All ranks of a stage have asked for the same; what one stage sent, the next one took."""
    stages = [ranks.calls(stage) for stage in range(ranks.shape.pp)]
    for calls in stages:
        assert all(own == calls[0] for own in calls)
    for before, after in pairwise(stages):
        sent = [call.shape for call in before[0] if call.kind == "send"]
        assert sent == [call.shape for call in after[0] if call.kind == "recv"]


@pytest.mark.parametrize(
    ("num_blocks", "chunk_tokens", "seed"),
    [
        (200, None, 1),
        (14, 9, 4),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((200, 9, 2), (14, None, 3))),
    ],
)
def test_each_of_a_crowd_gets_what_one_cpu_draws_for_it_alone(
    ranks: PlayedRanks, cpu: Driver, num_blocks: int, chunk_tokens: int | None, seed: int
) -> None:
    rig = ParallelRig(ranks, num_blocks=num_blocks, chunk_tokens=chunk_tokens, seed=seed)
    run_crowd(rig, NUM_REQUESTS)
    check_agreement(ranks)
    assert all(choice.is_right(cpu) for choice in rig.choices.values())
    assert rig.is_all_free
    assert ranks.num_sequences == 0
    assert rig.num_deepest == 2
    assert (rig.scheduler.decodes.num_preempted > 0) == (num_blocks < 100)


def crowd_is_served_rightly(model_dir: Path, cpu: Driver) -> bool:
    """Whether an instance of two ranks draws what it should."""
    with instance(model_dir, Parallelism(2, 1)) as ranks:
        rig = ParallelRig(ranks, seed=1)
        run_crowd(rig, 4)
        return all(choice.is_right(cpu) for choice in rig.choices.values())


def test_a_rank_that_draws_and_keeps_it_to_itself_is_seen(
    model_dir: Path, cpu: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert crowd_is_served_rightly(model_dir, cpu)
    monkeypatch.setattr(NcclCollectives, "broadcast", lambda *_: None)
    assert not crowd_is_served_rightly(model_dir, cpu)


def test_a_rank_that_takes_what_a_line_held_before_is_seen(
    model_dir: Path, cpu: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep = CudaRunner._keep

    def forget(runner: CudaRunner, drawn: torch.Tensor, lines: Sequence[int | None]) -> None:
        before = runner._last_tokens.clone()
        keep(runner, drawn, lines)
        if runner._model.shard.tp_rank == 1:
            runner._last_tokens = before

    monkeypatch.setattr(CudaRunner, "_keep", forget)
    assert not crowd_is_served_rightly(model_dir, cpu)


def test_a_graph_that_reads_other_hidden_states_than_those_that_came_is_seen(
    model_dir: Path, cpu: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = DecodeGraphs.run

    def run_on_old(graphs: DecodeGraphs, batch: Batch, hidden: Any, fill: Any) -> Replayed:
        if hidden is not None:
            hidden = torch.zeros_like(hidden)
        return run(graphs, batch, hidden, fill)

    monkeypatch.setattr(DecodeGraphs, "run", run_on_old)
    with instance(model_dir, Parallelism(1, 2)) as ranks:
        rig = ParallelRig(ranks, seed=1)
        run_crowd(rig, 2)
        assert not all(choice.is_right(cpu) for choice in rig.choices.values())


def test_every_sum_of_a_stage_is_in_the_graphs_of_all_its_ranks(ranks: PlayedRanks) -> None:
    """Two a layer, one of the embedding, one gather of the logits: for each size of a graph."""
    tp, pp = ranks.shape.tp, ranks.shape.pp
    sizes = len(graph_sizes(MAX_BATCH))
    for rank in ranks.ranks:
        shard = rank.shard
        per_graph = 2 * shard.layers.size + shard.is_first_stage + shard.is_last_stage
        expected = sizes * per_graph if tp > 1 else 0
        assert rank.device.num_captured_calls == expected
        assert rank.device.num_graphs == sizes
    assert len(ranks.ranks) == tp * pp


def test_a_rank_that_does_not_draw_never_waits_for_its_device_but_to_plan(
    ranks: PlayedRanks,
) -> None:
    others = [rank for rank in ranks.ranks if rank is not ranks.drawer]
    for rank in others:
        rank.device.num_downloads = 0
    rig = ParallelRig(ranks, seed=5)
    run_crowd(rig, 3)
    ranks.settle()
    assert {rank.device.num_downloads for rank in others} == {0}


def test_no_pull_begins_on_a_rank_that_is_behind_with_a_chunk_that_its_leader_has_ended_A6(
    model_dir: Path,
) -> None:
    prompt = tuple(b"Come unto these yellow sands")
    start = NewSequence(1, (0,), prompt, (), 0, greedy())
    chunk = StepPlan(
        step_id=1, added=(start,), blocks=(NewBlocks(1, (0, 1, 2)),), rows=(Row(1, 8, draws=False),)
    )
    pull = Pull(KVHandle("prefill-0", 1, 7, (0,), 4), (3,))
    with instance(model_dir, Parallelism(2, 1)) as ranks:
        other = ranks.ranks[1]
        pasts: list[int] = []
        exchanges: list[Any] = [rank.executor.exchange for rank in ranks.ranks]
        exchanges[0].begin = lambda pull: None
        exchanges[1].begin = lambda pull: pasts.append(other.device.past)
        ranks.collect(ranks.launch(chunk))
        ranks.settle()
        asked = other.device.now
        assert other.device.past < asked
        ranks.launch(StepPlan(step_id=2, pulls=(pull,)))
        ranks.settle()
        assert pasts[0] >= asked
