"""A pull that went wrong and was verified: done again from the prompt, and nothing is kept."""

from pathlib import Path

import pytest
import torch

from daemon.text import Tokenizer
from gpu_workers.cpu_exchange import Parts, copy_parts
from ipc.vocabulary import Role
from tests.end_to_end.engine_rig import EngineRig
from tests.end_to_end.town import Town, spec


class SpoilsOnce:
    """Copies, and flips a byte of the second pull."""

    def __init__(self) -> None:
        self._num_pulls = 0

    def __call__(self, parts: Parts) -> None:
        self._num_pulls += 1
        for source, target in parts:
            copy_parts(iter([(source, target)]))
            if self._num_pulls == 2:
                target[0, 0, 0, 0].view(torch.uint8)[0] ^= 1


def test_a_spoiled_pull_is_found_and_its_prompt_prefilled_again_A4_A7(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DISTSERVE_VERIFY_PULLS", "1")
    copy = SpoilsOnce()

    def make(role: Role, name: str, epoch: int) -> EngineRig:
        return EngineRig(role, tiny_llama, name=name, epoch=epoch, copy=copy)

    roles = {"p0": Role.PREFILL, "d0": Role.DECODE}
    town = Town(Tokenizer.from_directory(tiny_llama), roles, make_rig=make, max_context=512)
    clients = []
    for first in (1, 2, 2):
        clients.append(town.ask(spec(list(range(first, first + 40)))))
        town.settle()
    assert [len(client.tokens(0)) for client in clients] == [8, 8, 8]
    assert clients[1].tokens(0) == clients[2].tokens(0)
    assert town.houses["d0"].rig.scheduler.counters.pull_faults == 1
    assert town.houses["p0"].rig.scheduler.counters.prefill_steps == 4
    town.check_all_free()
    town.close()
