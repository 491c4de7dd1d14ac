"""Divisions of a model: every part held, stages of equal cost, what cannot be refused by name."""

import pytest

from ipc.sharding import ModelSizes, padded_vocab, refusal, shard, stage_layers
from ipc.vocabulary import Parallelism

SMOLLM2 = ModelSizes(
    name="smollm2",
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    hidden_size=576,
    intermediate_size=1536,
    vocab_size=49152,
)
TINY = ModelSizes(
    name="tiny",
    num_layers=4,
    num_heads=8,
    num_kv_heads=2,
    hidden_size=64,
    intermediate_size=96,
    vocab_size=101,
)


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("pp", [1, 2, 3, 4])
def test_every_part_is_held_by_somebody(tp: int, pp: int) -> None:
    shape = Parallelism(tp, pp)
    shards = [[shard(TINY, shape, s, r) for r in range(tp)] for s in range(pp)]
    assert [i for stage in shards for i in range(*_ends(stage[0].layers))] == [0, 1, 2, 3]
    for stage in shards:
        for part, total in (("heads", 8), ("columns", 96), ("vocab", padded_vocab(TINY, tp))):
            held = [i for rank in stage for i in range(*_ends(getattr(rank, part)))]
            assert held == list(range(total))
        assert {i for rank in stage for i in range(*_ends(rank.kv_heads))} == {0, 1}


@pytest.mark.parametrize("tp", [4, 8])
def test_a_shared_kv_head_is_the_one_of_the_ranks_own_queries(tp: int) -> None:
    for rank in range(tp):
        share = shard(TINY, Parallelism(tp), 0, rank)
        assert {head // 4 for head in range(*_ends(share.heads))} == {share.kv_heads.start}


def test_the_head_counts_where_stages_are_cut() -> None:
    """SmolLM2's head weighs as much as eight of its layers."""
    assert [span.size for span in stage_layers(SMOLLM2, 2)] == [19, 11]
    assert [span.size for span in stage_layers(SMOLLM2, 3)] == [13, 12, 5]


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        (Parallelism(2, 1), "tp 2 does not divide the 9 attention heads of smollm2"),
        (Parallelism(9, 1), "tp 9 does not divide the MLP width 1536 of smollm2"),
        (Parallelism(1, 31), "pp 31 is more than the 30 layers of smollm2"),
        (Parallelism(0, 1), "tp 0, pp 1: both must be at least 1"),
    ],
)
def test_what_cannot_be_divided_is_refused_by_name(shape: Parallelism, words: str) -> None:
    assert refusal(SMOLLM2, shape) == words


def test_kv_heads_are_divided_or_shared_evenly() -> None:
    sizes = ModelSizes(
        name="odd",
        num_layers=2,
        num_heads=12,
        num_kv_heads=3,
        hidden_size=48,
        intermediate_size=48,
        vocab_size=10,
    )
    assert refusal(sizes, Parallelism(3)) is None
    assert refusal(sizes, Parallelism(6)) is None
    assert "neither divides the 3 KV heads of odd nor is a multiple" in str(
        refusal(sizes, Parallelism(2))
    )


def _ends(span: object) -> tuple[int, int]:
    return span.start, span.stop  # type: ignore[attr-defined]
