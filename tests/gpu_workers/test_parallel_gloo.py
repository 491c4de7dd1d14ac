"""Ranks that talk by gloo: sums, gathers and hidden states arrive; a lost rank is noticed."""

import json
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from gpu_workers.collectives import CollectivesFailed
from gpu_workers.gloo_collectives import GlooCollectives
from gpu_workers.shm_collectives import sums_library
from ipc.vocabulary import Parallelism
from tests.gpu_workers.divisible import divisible
from tests.gpu_workers.driving import Driver
from tests.gpu_workers.group_driver import Gloo, driving
from tests.gpu_workers.joined_ranks import TYPES, WIDTH, met, shards, store_in
from tests.gpu_workers.rank_process import PROMPTS

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_sums_are_on_every_rank_and_gathers_on_the_first(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    def act(rank: GlooCollectives) -> tuple[torch.Tensor, torch.Tensor | None]:
        mine = torch.full((3, 2), rank.tp_rank + 1.0, dtype=dtype)
        return rank.all_reduce(mine.clone()), rank.gather_columns(mine)

    with met(store_in(tmp_path), 4, 1, dtype=dtype) as run:
        results = run(act)
    assert all(torch.equal(summed, torch.full((3, 2), 10.0, dtype=dtype)) for summed, _ in results)
    row = torch.tensor([1, 1, 2, 2, 3, 3, 4, 4], dtype=dtype)
    assert torch.equal(results[0][1], row.expand(3, 8))
    assert [gathered for _, gathered in results[1:]] == [None] * 3


def test_a_sum_is_made_in_place_and_of_no_rows_as_well(tmp_path: Path) -> None:
    def act(rank: GlooCollectives) -> bool:
        mine, none = torch.ones(2, 3), torch.empty(0, 3)
        return rank.all_reduce(mine) is mine and rank.all_reduce(none) is none

    with met(store_in(tmp_path), 2, 1) as run:
        assert run(act) == [True, True]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_hidden_states_pass_from_stage_to_stage_in_order(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    lengths = (3, 1, 5, 2, 2, 4, 1, 1)

    def act(rank: GlooCollectives) -> list[torch.Tensor]:
        seen = []
        for step, length in enumerate(lengths):
            if rank.stage == 0:
                hidden = torch.full((length, WIDTH), step + 10.0 * rank.tp_rank, dtype=dtype)
            else:
                hidden = rank.receive(length)
            seen.append(hidden.clone())
            if rank.stage < 2:
                rank.send_forward(hidden)
                hidden.fill_(-1.0)  # the sender's memory is its own again
        return seen

    with met(store_in(tmp_path), 2, 3, dtype=dtype) as run:
        results = run(act)
    for stage in (1, 2):
        for tp_rank in (0, 1):
            sent, seen = results[tp_rank], results[2 * stage + tp_rank]
            assert all(torch.equal(a, b) for a, b in zip(sent, seen, strict=True))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_what_goes_to_the_next_stage_is_counted_in_bytes(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    lengths = (3, 1, 5)

    def act(rank: GlooCollectives) -> int:
        for length in lengths:
            if rank.stage == 0:
                rank.send_forward(torch.zeros((length, WIDTH), dtype=dtype))
            else:
                rank.receive(length)
        return rank.sent_bytes

    with met(store_in(tmp_path), 1, 2, dtype=dtype) as run:
        assert run(act) == [sum(lengths) * WIDTH * dtype.itemsize, 0]


def test_a_rank_that_leaves_is_noticed_by_those_that_wait_for_it(tmp_path: Path) -> None:
    def act(rank: GlooCollectives) -> str:
        if rank.tp_rank == 1:
            rank.close()
            return ""
        with pytest.raises(CollectivesFailed) as caught:
            rank.all_reduce(torch.ones(2))
        return str(caught.value)

    started_s = time.monotonic()
    with met(store_in(tmp_path), 2, 1) as run:
        messages = run(act)
    assert re.match("stage 0, tp rank 0: a sum failed: .*(peer|pipe)", messages[0])
    assert time.monotonic() - started_s < 10.0


def test_a_silent_rank_is_waited_for_no_longer_than_agreed(tmp_path: Path) -> None:
    def act(rank: GlooCollectives) -> str:
        if rank.stage == 0:
            return ""
        with pytest.raises(CollectivesFailed) as caught:
            rank.receive(1)
        return str(caught.value)

    with met(store_in(tmp_path), 1, 2, timeout_s=0.5) as run:
        assert "receiving hidden states failed: Timed out" in run(act)[1]


def test_ranks_that_never_come_are_waited_for_no_longer_than_agreed(tmp_path: Path) -> None:
    (alone, _) = shards(2, 1)
    with pytest.raises(CollectivesFailed, match="stage 0, tp rank 0: joining the instance failed"):
        GlooCollectives(
            store_in(tmp_path),
            alone,
            hidden_size=WIDTH,
            dtype=torch.float32,
            timeout_s=0.5,
        )


@pytest.mark.parametrize("sums", ["over gloo", "through shared memory"])
@pytest.mark.parametrize("name", ["llama-gqa", "opt-post-norm"])
def test_a_model_divided_among_ranks_says_what_one_worker_says(
    name: str, sums: str, tmp_path: Path
) -> None:
    library = None if sums == "over gloo" else sums_library()
    model_dir = divisible(name, tmp_path / "model")
    expected = [Driver(model_dir).generate(prompt, 5) for prompt in PROMPTS]
    over = Gloo(store_in(tmp_path), library)
    with driving(model_dir, Parallelism(2, 2), gloo=over) as driver:
        assert [driver.generate(prompt, 5) for prompt in PROMPTS] == expected


def test_processes_of_their_own_say_what_one_worker_says(tmp_path: Path) -> None:
    """Rendezvous over TCP, as between nodes; stages share memory where there is a compiler."""
    model_dir = divisible("llama-gqa", tmp_path / "model")
    expected = [Driver(model_dir).generate(prompt, 5) for prompt in PROMPTS]
    url = f"tcp://127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "tests.gpu_workers.rank_process"]
    finished = subprocess.run(
        [*command, str(model_dir), url, json.dumps(expected)],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        check=True,
        timeout=100,
    )
    assert json.loads(finished.stdout) == [[], [], expected, []]  # by stage 1's tp rank 0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
