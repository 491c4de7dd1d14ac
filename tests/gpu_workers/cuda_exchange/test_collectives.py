"""Collectives of GPU workers, by groups with NCCL's face: gloo's, on the host."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_workers import nccl_collectives
from gpu_workers.collectives import CollectivesFailed
from gpu_workers.gloo_collectives import GlooCollectives
from gpu_workers.nccl_collectives import NcclCollectives, StagedCollectives, join_gpus
from gpu_workers.rendezvous import LOOPBACK, distributed, meet_at
from ipc.sharding import Shard
from tests.gpu_workers.joined_ranks import WIDTH, shards, store_in

CPU = torch.device("cpu")
WAIT = timedelta(seconds=15)


def gloo_group(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    options = distributed.ProcessGroupGloo._Options()
    options._devices = [distributed.ProcessGroupGloo.create_device(hostname=LOOPBACK)]
    options._timeout = timeout
    return distributed.ProcessGroupGloo(store, rank, size, options)


@contextmanager
def met(path: Path, tp: int, pp: int) -> Iterator[Callable[..., list[Any]]]:
    def join(own: Shard) -> NcclCollectives:
        at = meet_at(store_in(path), own, WAIT)
        how = {"hidden_size": WIDTH, "dtype": torch.float32, "device": CPU, "timeout_s": 15.0}
        return NcclCollectives(at, own, **how, make_group=gloo_group)  # type: ignore[arg-type]

    with ThreadPoolExecutor(tp * pp) as pool:
        ranks = list(pool.map(join, shards(tp, pp)))
        yield lambda act: list(pool.map(act, ranks))
    for rank in ranks:
        rank.close()


def test_sums_are_made_in_place_on_every_rank_and_gathers_are_the_first_ones(
    tmp_path: Path,
) -> None:
    def act(rank: NcclCollectives) -> tuple[bool, torch.Tensor, torch.Tensor | None]:
        mine = torch.full((3, 2), rank.tp_rank + 1.0)
        gathered = rank.gather_columns(mine)
        return rank.all_reduce(mine) is mine, mine, gathered

    with met(tmp_path, 2, 1) as run:
        results = run(act)
    assert all(is_same and torch.equal(s, torch.full((3, 2), 3.0)) for is_same, s, _ in results)
    assert torch.equal(results[0][2], torch.tensor([1.0, 1, 2, 2]).expand(3, 4))
    assert results[1][2] is None


def test_what_the_first_rank_has_comes_to_all_of_its_stage(tmp_path: Path) -> None:
    def act(rank: NcclCollectives) -> list[int]:
        tokens = torch.tensor([7, 8, 9]) if rank.tp_rank == 0 else torch.zeros(3, dtype=torch.int64)
        rank.broadcast(tokens)
        return tokens.tolist()

    with met(tmp_path, 2, 2) as run:
        assert run(act) == [[7, 8, 9]] * 4


def test_ranks_go_on_together_when_the_last_of_them_is_there(tmp_path: Path) -> None:
    has_come: list[int] = []
    may_come = threading.Event()

    def act(rank: NcclCollectives) -> list[int]:
        if rank.tp_rank == 0:
            may_come.set()
        else:
            may_come.wait(15.0)
            has_come.append(rank.tp_rank)
        rank.assemble()
        return list(has_come)

    with met(tmp_path, 2, 1) as run:
        assert run(act) == [[1], [1]]


def test_what_holds_calls_of_a_group_is_closed_before_the_group(tmp_path: Path) -> None:
    closed: list[bool] = []

    def act(rank: NcclCollectives) -> None:
        rank.close_before(lambda: closed.append(rank._groups is not None))
        rank.close()

    with met(tmp_path, 2, 1) as run:
        run(act)
    assert closed == [True, True]


class Stuck:
    """A group that cannot be given up; so is one of a device that failed."""

    def abort(self) -> None:
        raise RuntimeError("NCCL error: unhandled cuda error\nLast error: ...")


def test_who_leaves_gives_up_all_groups_and_hides_no_reason_for_leaving(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def act(rank: NcclCollectives) -> None:
        stage, chain = rank._joined()
        rank._groups = Stuck(), chain
        rank.close()
        stage.abort()

    with met(tmp_path, 2, 1) as run:
        run(act)
    assert caplog.text.count("a group was not given up: NCCL error: unhandled cuda error") == 2


def test_only_ranks_that_the_host_does_not_help_are_on_the_device(tmp_path: Path) -> None:
    with met(tmp_path, 2, 1) as run:
        assert all(run(lambda rank: rank.on_device is rank))
    assert StagedCollectives.on_device is None
    assert GlooCollectives.on_device is None


def test_no_rows_are_no_call(tmp_path: Path) -> None:
    def act(rank: NcclCollectives) -> list[int]:
        none = rank.all_reduce(torch.empty(0, 3))
        gathered = rank.gather_columns(torch.empty(0, 3))
        return [none.numel(), 0 if gathered is None else gathered.shape[1]]

    with met(tmp_path, 2, 1) as run:
        assert run(act) == [[0, 6], [0, 0]]


def test_hidden_states_pass_in_order_and_may_be_changed_at_once(tmp_path: Path) -> None:
    def act(rank: NcclCollectives) -> list[float]:
        seen = []
        for step in range(5):
            if rank.stage == 0:
                hidden = torch.full((step + 1, WIDTH), float(step))
                rank.send_forward(hidden)
                hidden.fill_(-1.0)
            else:
                seen.append(float(rank.receive(step + 1).mean()))
        return seen

    with met(tmp_path, 1, 2) as run:
        assert run(act)[1] == [0.0, 1.0, 2.0, 3.0, 4.0]
        assert run(lambda rank: rank.sent_bytes) == [4 * WIDTH * 15, 0]


def test_who_has_left_is_told_so(tmp_path: Path) -> None:
    with met(tmp_path, 2, 1) as run:
        run(lambda rank: rank.close())
        with pytest.raises(CollectivesFailed, match="stage 0, tp rank 0: we have left"):
            run(lambda rank: rank.all_reduce(torch.ones(1)))


def test_a_failed_call_is_told_with_its_first_line(tmp_path: Path) -> None:
    def act(rank: NcclCollectives) -> torch.Tensor:
        return rank.all_reduce(torch.ones(1, dtype=torch.uint16))

    with met(tmp_path, 2, 1) as run, pytest.raises(CollectivesFailed, match="a sum failed: "):
        run(act)


def test_ranks_of_one_gpu_talk_through_the_host(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def join(own: Shard) -> Any:
        at: Any = {"hidden_size": WIDTH, "dtype": torch.float32, "device": CPU, "gpu_uuid": "a"}
        return join_gpus(store_in(tmp_path), own, **at)

    def act(rank: StagedCollectives) -> torch.Tensor:
        return rank.all_reduce(torch.ones(2))

    with ThreadPoolExecutor(2) as pool:
        ranks = list(pool.map(join, shards(2, 1)))
        assert all(isinstance(rank, StagedCollectives) for rank in ranks)
        assert [summed.tolist() for summed in pool.map(act, ranks)] == [[2.0, 2.0]] * 2
    assert "they talk by gloo" in caplog.text


def test_ranks_with_a_gpu_each_talk_by_nccl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    def note(at: Any, own: Shard, **how: Any) -> str:
        made.append(own.tp_rank)
        return "nccl"

    monkeypatch.setattr(nccl_collectives, "NcclCollectives", note)

    def join(own: Shard) -> Any:
        at: Any = {"hidden_size": WIDTH, "dtype": torch.float32, "device": CPU}
        return join_gpus(store_in(tmp_path), own, **at, gpu_uuid=f"GPU-{own.tp_rank}")

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(join, shards(2, 1))) == ["nccl", "nccl"]
