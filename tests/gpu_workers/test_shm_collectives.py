"""Ranks of a stage that share memory: exact sums, gathers, lost and silent ranks, nothing left."""

import logging
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from gpu_workers import shm_collectives
from gpu_workers.collectives import CollectivesFailed
from gpu_workers.gloo_collectives import GlooCollectives
from gpu_workers.native_build import NativeLibrary
from gpu_workers.shm_collectives import SLOT_BYTES, sums_library
from tests.gpu_workers.joined_ranks import TYPES, WIDTH, met, shards, store_in

REPOSITORY = Path(__file__).parents[2]
SIZES = (1, 15, 17, 577, 2 * SLOT_BYTES // 4 + 3)  # of vectors, of none, and of several slots
MEMORY = "/memfd:distserved-sums (deleted)"


@pytest.fixture(scope="module")
def library() -> NativeLibrary:
    found = sums_library()
    if found is None:
        pytest.skip("no compiled library on this machine")
    return found


def parts(tp: int, shape: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    """Of sizes that differ from rank to rank, so that the order of additions shows."""
    generator = torch.Generator().manual_seed(tp)
    return [
        (10.0 ** (r - 2) * torch.randn(shape, generator=generator)).to(dtype) for r in range(tp)
    ]


def exact(of: list[torch.Tensor]) -> torch.Tensor:
    """In fp32, in the order of ranks, rounded once."""
    total = of[0].float()
    for part in of[1:]:
        total = total + part.float()
    return total.to(of[0].dtype)


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_sums_are_made_in_fp32_in_the_order_of_ranks_on_all_of_them(
    tmp_path: Path, library: NativeLibrary, dtype: torch.dtype, tp: int
) -> None:
    mine = {size: parts(tp, (size,), dtype) for size in SIZES}

    def act(rank: GlooCollectives) -> list[torch.Tensor]:
        return [rank.all_reduce(mine[size][rank.tp_rank].clone()) for size in SIZES]

    with met(store_in(tmp_path), tp, 1, library=library) as run:
        results = run(act)
    for sums in results:
        assert all(torch.equal(s, exact(mine[n])) for s, n in zip(sums, SIZES, strict=True))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_two_ranks_come_to_the_bits_of_gloo(
    tmp_path: Path, library: NativeLibrary, dtype: torch.dtype
) -> None:
    mine = parts(2, (33, 577), dtype)

    def act(rank: GlooCollectives) -> torch.Tensor:
        return rank.all_reduce(mine[rank.tp_rank].clone())

    with met(store_in(tmp_path), 2, 1) as run:
        theirs = run(act)
    (tmp_path / "again").mkdir()
    with met(store_in(tmp_path / "again"), 2, 1, library=library) as run:
        assert all(torch.equal(ours, theirs[0]) for ours in run(act))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_16_bit_number_passes_as_it_is(
    tmp_path: Path, library: NativeLibrary, dtype: torch.dtype
) -> None:
    """Subnormals, infinities and NaN as well. (bf16's subnormals are zero to the CPU's own
    rounding, in the kernels too.)"""
    numbers = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
    if dtype == torch.bfloat16:
        numbers = numbers[~((numbers.abs() < torch.finfo(dtype).tiny) & (numbers != 0))]

    def act(rank: GlooCollectives) -> torch.Tensor:
        return rank.all_reduce(numbers.clone() if rank.tp_rank else torch.zeros_like(numbers))

    with met(store_in(tmp_path), 2, 1, library=library) as run:
        for summed in run(act):
            assert torch.equal(summed.isnan(), numbers.isnan())
            assert torch.equal(summed.nan_to_num(), (numbers + 0).nan_to_num())


@pytest.mark.parametrize("shape", [(1, 1), (5, 33), (3, SLOT_BYTES // 4 + 1), (9000, 17)])
def test_gathers_of_any_size_are_side_by_side_on_the_first_rank(
    tmp_path: Path, library: NativeLibrary, shape: tuple[int, int]
) -> None:
    mine = parts(3, shape, torch.float32)
    mine.append(mine[0] + 1)

    def act(rank: GlooCollectives) -> torch.Tensor | None:
        return rank.gather_columns(mine[rank.tp_rank])

    with met(store_in(tmp_path), 4, 1, library=library) as run:
        first, *others = run(act)
    assert torch.equal(first, torch.cat(mine, dim=1))
    assert others == [None] * 3


def test_ranks_that_differ_in_haste_never_read_what_is_not_meant_for_them(
    tmp_path: Path, library: NativeLibrary
) -> None:
    """Sums and gathers in turn, of many sizes, with one rank after the other late."""
    sizes = [(7 * step) % 61 + 1 for step in range(400)]

    def act(rank: GlooCollectives) -> bool:
        is_right = True
        for step, size in enumerate(sizes):
            if step % 3 == rank.tp_rank:
                os.sched_yield()
            mine = torch.full((2, size), float(step + rank.tp_rank))
            if step % 5 < 2:
                gathered = rank.gather_columns(mine)
                if gathered is not None:
                    seen = gathered.view(2, 3, size)[0, :, -1].tolist()
                    is_right &= seen == [step, step + 1, step + 2]
            else:
                is_right &= bool((rank.all_reduce(mine) == 3 * step + 3).all())
        return is_right

    with met(store_in(tmp_path), 3, 1, library=library) as run:
        assert run(act) == [True] * 3


def test_a_sum_is_made_in_place_and_of_no_rows_as_well(
    tmp_path: Path, library: NativeLibrary
) -> None:
    def act(rank: GlooCollectives) -> bool:
        mine, none, turned = torch.ones(2, 3), torch.empty(0, 3), torch.ones(3, 2).t()
        is_in_place = rank.all_reduce(mine) is mine and rank.all_reduce(none) is none
        return is_in_place and torch.equal(rank.all_reduce(turned), torch.full((2, 3), 2.0))

    with met(store_in(tmp_path), 2, 1, library=library) as run:
        assert run(act) == [True, True]


def test_a_rank_that_leaves_is_noticed_at_once_but_its_last_words_are_heard(
    tmp_path: Path, library: NativeLibrary
) -> None:
    def act(rank: GlooCollectives) -> str:
        assert torch.equal(rank.all_reduce(torch.ones(2)), torch.full((2,), 2.0))
        if rank.tp_rank == 1:
            rank.close()
        with pytest.raises(CollectivesFailed) as caught:
            rank.all_reduce(torch.ones(2))
        return str(caught.value)

    with met(store_in(tmp_path), 2, 1, timeout_s=600.0, library=library) as run:
        assert run(act) == [
            "stage 0, tp rank 0: a sum failed: a peer has left",
            "stage 0, tp rank 1: we have left the instance",
        ]


def test_a_killed_rank_is_noticed_long_before_the_time_is_over(
    tmp_path: Path, library: NativeLibrary
) -> None:
    url = store_in(tmp_path)
    command = [sys.executable, "-m", "tests.gpu_workers.lost_rank", url]
    with subprocess.Popen(command, cwd=REPOSITORY) as other:
        rank = GlooCollectives(
            url,
            shards(2, 1)[0],
            hidden_size=WIDTH,
            dtype=torch.float32,
            timeout_s=600.0,
            library=library,
        )
        assert torch.equal(rank.all_reduce(torch.ones(3)), torch.full((3,), 2.0))
        with pytest.raises(CollectivesFailed, match="a sum failed: a peer has left"):
            rank.all_reduce(torch.ones(3))
        rank.close()
    assert other.returncode == -9


def test_a_silent_rank_is_waited_for_no_longer_than_agreed(
    tmp_path: Path, library: NativeLibrary
) -> None:
    """Who gathers for the first rank may be one piece ahead of it, and no more."""

    def act(rank: GlooCollectives) -> list[str]:
        if rank.tp_rank == 0:
            return []
        mine = torch.ones(2, 2)
        assert rank.gather_columns(mine) is None
        with pytest.raises(CollectivesFailed) as gather:
            rank.gather_columns(mine)
        with pytest.raises(CollectivesFailed) as summed:
            rank.all_reduce(mine)
        return [str(gather.value), str(summed.value)]

    with met(store_in(tmp_path), 2, 1, timeout_s=1.5, library=library) as run:
        assert run(act)[1] == [
            "stage 0, tp rank 1: a gather failed: Timed out after 1.5 s",
            "stage 0, tp rank 1: a sum failed: Timed out after 1.5 s",
        ]


def test_nothing_has_a_name_and_nothing_is_left(tmp_path: Path, library: NativeLibrary) -> None:
    def num_mapped() -> int:
        return Path("/proc/self/maps").read_text().count(MEMORY)

    before = num_mapped(), len(os.listdir("/proc/self/fd"))
    with met(store_in(tmp_path), 2, 2, library=library) as run:
        run(lambda rank: rank.all_reduce(torch.ones(2)))
        assert num_mapped() - before[0] == 4  # once for each rank
        assert [path.name for path in tmp_path.iterdir()] == ["store"]
    assert num_mapped() == before[0]
    del run
    assert len(os.listdir("/proc/self/fd")) == before[1]


def test_where_one_rank_has_no_library_all_of_them_sum_over_gloo(
    tmp_path: Path, library: NativeLibrary, caplog: pytest.LogCaptureFixture
) -> None:
    def act(number: int) -> torch.Tensor:
        rank = GlooCollectives(
            store_in(tmp_path),
            shards(2, 1)[number],
            hidden_size=WIDTH,
            dtype=torch.float32,
            library=None if number else library,
        )
        total = rank.all_reduce(torch.ones(2))
        rank.close()
        return total

    with caplog.at_level(logging.INFO), ThreadPoolExecutor(2) as pool:
        assert [total.tolist() for total in pool.map(act, range(2))] == [[2.0, 2.0]] * 2
    said = {record.getMessage() for record in caplog.records}
    assert said == {"sums go over gloo: tp rank 1 has no compiled library"}


def test_whoever_asks_for_torch_gets_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTSERVE_KERNELS", "torch")
    assert shm_collectives.sums_library() is None
