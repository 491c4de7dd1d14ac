"""Pools of CPU workers: what is pulled is what was there, for equal and unequal layouts."""

import gc
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch

from gpu_workers.cpu_exchange import CpuExchange
from gpu_workers.step_plan import Pull
from ipc.kv_layout import LayoutMismatch, RankLayout, Span
from ipc.vocabulary import DType, KVHandle, WorkerName

NUM_LAYERS, NUM_HEADS = 4, 6


def layout(layers: tuple[int, int], heads: tuple[int, int], block_size: int = 4) -> RankLayout:
    return RankLayout(Span(*layers), Span(*heads), 8, block_size, 8, DType.BF16)


WHOLE = layout((0, NUM_LAYERS), (0, NUM_HEADS))


def reference() -> torch.Tensor:
    """[blocks, heads, layers, 2, P, D] of a whole instance, every element its own value."""
    torch.manual_seed(0)
    return torch.randn(WHOLE.shape).to(torch.bfloat16)


def part(of: torch.Tensor, of_rank: RankLayout) -> torch.Tensor:
    heads, layers = of_rank.heads, of_rank.layers
    return of[:, heads.start : heads.stop, layers.start : layers.stop]


def exporters(instance: str, layouts: Sequence[RankLayout]) -> list[CpuExchange]:
    whole = reference()
    exchanges = []
    for one in layouts:
        exchange = CpuExchange(one, instance)
        exchange.pool.copy_(part(whole, one))
        exchanges.append(exchange)
    return exchanges


@contextmanager
def importer(
    own: RankLayout, sources: Sequence[CpuExchange], epoch: int = 5
) -> Iterator[CpuExchange]:
    exchange = CpuExchange(own, "importer")
    for rank, source in enumerate(sources):
        name = WorkerName("there", 0, rank)
        exchange.map_peer(name, epoch, source.layout, os.dup(source.descriptor))
    yield exchange
    for one in (exchange, *sources):
        os.close(one.descriptor)


def pull(source_blocks: tuple[int, ...], into: tuple[int, ...], epoch: int = 5) -> Pull:
    return Pull(KVHandle("there", epoch, 7, source_blocks, 4 * len(into)), into)


def test_pulled_blocks_equal_their_source_and_nothing_else_changes_A7() -> None:
    with importer(WHOLE, exporters("there", [WHOLE])) as exchange:
        exchange.begin(pull((6, 1), (0, 3)))
        assert torch.equal(exchange.pool[[0, 3]], reference()[[6, 1]])
        assert not exchange.pool[[1, 2, 4, 5, 6, 7]].any()
        (result,) = exchange.finished()
        assert (result.request_id, result.num_bytes) == (7, 2 * WHOLE.block_bytes)
        assert exchange.finished() == []


@pytest.mark.parametrize(
    "sources",
    [
        [layout((0, 4), (0, 3)), layout((0, 4), (3, 6))],
        [layout((0, 2), (0, 6)), layout((2, 4), (0, 6))],
        [layout((0, 1), (0, 6)), layout((1, 4), (0, 2)), layout((1, 4), (2, 6))],
    ],
    ids=["tp2", "pp2", "uneven"],
)
@pytest.mark.parametrize("own", [WHOLE, layout((1, 3), (2, 5))], ids=["whole", "part"])
def test_each_rank_pulls_its_part_from_all_that_hold_some(
    sources: list[RankLayout], own: RankLayout
) -> None:
    with importer(own, exporters("there", sources)) as exchange:
        exchange.begin(pull((2,), (5,)))
        assert torch.equal(exchange.pool[5], part(reference(), own)[2])
        assert exchange.finished()[0].num_bytes == own.block_bytes


def test_a_peer_with_other_blocks_is_refused() -> None:
    other = CpuExchange(layout((0, 4), (0, 6), block_size=8), "there")
    with (
        importer(WHOLE, []) as exchange,
        pytest.raises(LayoutMismatch, match="block_size differs: 8 at the source, 4 here"),
    ):
        exchange.map_peer(WorkerName("there"), 5, other.layout, other.descriptor)
    os.close(other.descriptor)


def test_a_peer_is_known_in_its_epoch_alone_and_forgotten_with_it() -> None:
    with importer(WHOLE, exporters("there", [WHOLE])) as exchange:
        assert exchange.knows("there", 5)
        assert not exchange.knows("there", 6)
        assert not exchange.knows("elsewhere", 5)
        exchange.unmap_instance("there", 6)
        assert exchange.knows("there", 5)
        exchange.unmap_instance("there", 5)
        exchange.unmap_instance("there", 5)
        assert not exchange.knows("there", 5)


def test_a_new_incarnation_is_mapped_beside_the_old_one_until_that_is_forgotten_B1_B3() -> None:
    with importer(WHOLE, exporters("there", [WHOLE])) as exchange:
        reborn = CpuExchange(WHOLE, "there")
        reborn.pool.fill_(3.0)
        exchange.map_peer(WorkerName("there"), 6, WHOLE, reborn.descriptor)
        exchange.begin(pull((1,), (1,)))
        exchange.begin(pull((1,), (2,), epoch=6))
        assert torch.equal(exchange.pool[1], reference()[1])
        assert (exchange.pool[2] == 3.0).all()
        exchange.unmap_instance("there", 5)
        assert not exchange.knows("there", 5)
        assert exchange.knows("there", 6)


def test_an_instance_is_known_when_its_mapped_ranks_hold_all_that_is_pulled() -> None:
    halves = [layout((0, 4), (0, 3)), layout((0, 4), (3, 6))]
    sources = exporters("there", halves)
    with importer(WHOLE, []) as whole, importer(layout((0, 4), (4, 6)), []) as part:
        for rank, source in enumerate(sources):
            for exchange in (whole, part):
                assert not exchange.knows("there", 5)
                descriptor = os.dup(source.descriptor)
                exchange.map_peer(WorkerName("there", 0, rank), 5, source.layout, descriptor)
        assert whole.knows("there", 5)
        assert part.knows("there", 5)
    for source in sources:
        os.close(source.descriptor)


def test_an_exchange_that_is_closed_knows_nobody_and_holds_no_descriptor() -> None:
    before = len(os.listdir("/proc/self/fd"))
    (there,) = exporters("there", [WHOLE])
    here = CpuExchange(WHOLE, "here")
    here.map_peer(WorkerName("there"), 5, WHOLE, os.dup(there.descriptor))
    here.begin(pull((6,), (0,)))
    here.close()
    assert here.pull_path == ""
    assert not here.knows("there", 5)
    assert torch.equal(here.pool[0], reference()[6])  # which is there as long as somebody looks
    there.close()
    del here, there  # and what they mapped
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before
