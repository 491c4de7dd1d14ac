"""With DISTSERVE_VERIFY_PULLS=1 a pull is compared with its source, block by block."""

import logging
import os
from collections.abc import Iterator

import pytest
import torch

from gpu_workers.cpu_exchange import CpuExchange, Parts, copy_parts
from gpu_workers.step_plan import Pull
from ipc.kv_layout import RankLayout, Span
from ipc.vocabulary import DType, KVHandle, WorkerName

PULL = Pull(KVHandle("there", 5, 7, (2, 0, 1), 12), (1, 3, 0))
OTHER_LAYERS = WorkerName("there", 1, 0)


def layout(first_layer: int, num_layers: int) -> RankLayout:
    return RankLayout(Span(first_layer, first_layer + num_layers), Span(0, 3), 4, 4, 8, DType.BF16)


def copy_with_a_flipped_byte(parts: Parts) -> None:
    """A copy of which one byte of the second block is wrong."""
    pairs = list(parts)
    copy_parts(iter(pairs))
    _, second = pairs[1]
    second[1, 1, 1, 2].view(torch.uint8)[5] ^= 0x10


@pytest.fixture
def sources() -> Iterator[list[CpuExchange]]:
    """Two stages of a pipeline, full of noise."""
    stages = [CpuExchange(layout(0, 2), "there"), CpuExchange(layout(2, 2), "there")]
    for stage in stages:
        stage.pool.copy_(torch.randn(stage.layout.shape))
    yield stages
    for stage in stages:
        os.close(stage.descriptor)


def faults(sources: list[CpuExchange], **how: object) -> int:
    """What a rank with all layers finds in a pull from both."""
    exchange = CpuExchange(layout(0, 4), "here", **how)  # type: ignore[arg-type]
    for name, source in zip((WorkerName("there"), OTHER_LAYERS), sources, strict=True):
        exchange.map_peer(name, 5, source.layout, os.dup(source.descriptor))
    exchange.begin(PULL)
    os.close(exchange.descriptor)
    (result,) = exchange.finished()
    return result.num_different


def test_a_flipped_byte_is_seen_in_the_block_that_has_it_A4_A7(
    sources: list[CpuExchange],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("DISTSERVE_VERIFY_PULLS", "1")
    with caplog.at_level(logging.ERROR):
        assert faults(sources, copy=copy_with_a_flipped_byte) == 2
    said = "request 7: 1 of 3 blocks pulled from there differ from their source"
    assert caplog.messages == [said] * 2


def test_a_true_copy_passes(sources: list[CpuExchange], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTSERVE_VERIFY_PULLS", "1")
    assert faults(sources) == 0


def test_a_source_that_changes_before_its_reader_has_confirmed_is_seen(
    sources: list[CpuExchange], monkeypatch: pytest.MonkeyPatch
) -> None:
    def copy_and_overwrite(parts: Parts) -> None:
        copy_parts(parts)
        sources[1].pool[1, 0, 0, 0, 0, 0] += 1.0

    monkeypatch.setenv("DISTSERVE_VERIFY_PULLS", "1")
    assert faults(sources, copy=copy_and_overwrite) == 1


@pytest.mark.parametrize("value", ["", "0"])
def test_nothing_is_compared_unless_it_is_asked_for(
    sources: list[CpuExchange], monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("DISTSERVE_VERIFY_PULLS", value)
    assert faults(sources, copy=copy_with_a_flipped_byte) == 0
