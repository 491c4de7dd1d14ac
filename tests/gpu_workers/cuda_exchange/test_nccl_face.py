"""How groups of GPUs are made, where no NCCL is: with what torch declares, on its own options."""

import ast
import inspect
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import Backend

from gpu_workers.nccl_collectives import nccl_group

DECLARED = Path(torch.__file__).parent / "_C/_distributed_c10d.pyi"


class Played:
    """What `nccl_group` makes here."""

    class Options(Backend.Options):
        def __init__(self, is_high_priority_stream: bool = False) -> None:
            super().__init__("nccl")

    def __init__(self, store: object, rank: int, size: int, options: Backend.Options) -> None:
        self.made_with: tuple[object, ...] = (store, rank, size)
        self.options = options


def classes(body: list[ast.stmt]) -> Iterator[tuple[str, list[ast.stmt]]]:
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield node.name, node.body


def arguments(body: list[ast.stmt]) -> list[str]:
    """Of the class's constructor."""
    found = (node for node in body if isinstance(node, ast.FunctionDef) and node.name == "__init__")
    return [argument.arg for argument in next(found).args.args]


def test_the_played_group_has_the_constructors_that_torch_declares() -> None:
    nccl = dict(classes(ast.parse(DECLARED.read_text(encoding="utf-8")).body))["ProcessGroupNCCL"]
    options = dict(classes(nccl))["Options"]
    assert arguments(nccl) == list(inspect.signature(Played.__init__).parameters)
    assert arguments(options) == list(inspect.signature(Played.Options.__init__).parameters)


def test_a_group_of_gpus_has_its_timeout_in_torchs_own_options(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", Played, raising=False)
    monkeypatch.setenv("NCCL_GRAPH_REGISTER", "0")  # it is set for the process, which tests share
    store: Any = object()
    group = nccl_group(store, 1, 2, timedelta(seconds=7))
    assert group.made_with == (store, 1, 2)
    assert group.options._timeout == timedelta(seconds=7)
    assert group.options.backend == "nccl"
