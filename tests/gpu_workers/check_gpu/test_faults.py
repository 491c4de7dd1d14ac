"""The check fails where it must: keys and values swapped, a wrong stride, a missing fence, slow
links, a wrong scale, tokens that no engine would draw."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from gpu_workers.check_gpu.attention import Heads, check_attention
from gpu_workers.check_gpu.backend import CpuBackend, spec_of
from gpu_workers.check_gpu.bandwidth import require_fast
from gpu_workers.check_gpu.driver import Driver
from gpu_workers.check_gpu.outcome import CheckFailed
from gpu_workers.check_gpu.pulls import check_pulls
from gpu_workers.check_gpu.scoring import SLACK, require_likely
from gpu_workers.check_gpu.tiny_models import TINY, write_config
from gpu_workers.cpu_exchange import CpuExchange, Parts, copy_parts
from gpu_workers.executor import Executor
from gpu_workers.kernels import Kernels
from gpu_workers.models.config import ModelConfig
from ipc.kv_layout import RankLayout
from tests.gpu_workers.check_gpu.played_gpu import played_gpu


def ignored(name: str, value: object) -> None:
    """A figure that a test does not look at."""


ONE = ((1, 1),)
TWO = ((1, 1), (2, 1))
HEADS = (Heads(64, 6, 2),)


def swapped(parts: Parts) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Keys where values belong."""
    for source, target in parts:
        yield source.flip(2), target


def shifted(parts: Parts) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Every layer from the one beside it, as with a wrong distance of heads."""
    for source, target in parts:
        yield source.roll(1, 1), target


class LateExchange(CpuExchange):
    """Says that a pull has ended before it has begun to copy."""

    def __init__(self, layout: RankLayout, label: str) -> None:
        self._late: list[tuple[torch.Tensor, torch.Tensor]] = []
        super().__init__(layout, label, copy=self._late.extend)

    def unmap_instance(self, instance: str, epoch: int) -> None:
        copy_parts(iter(self._late))
        self._late.clear()
        super().unmap_instance(instance, epoch)


class Faulty(CpuBackend):
    """The CPU with one fault."""

    def __init__(self, make: Any = CpuExchange, alter: Any = None) -> None:
        self._make, self._alter = make, alter

    def exchange(self, layout: RankLayout, label: str, **how: Any) -> CpuExchange:
        exchange: CpuExchange = self._make(layout, label)
        return exchange

    def kernels(self, config: ModelConfig, pool: torch.Tensor, max_context: int) -> Kernels:
        kernels = super().kernels(config, pool, max_context)
        return kernels if self._alter is None else self._alter(kernels, config, pool)


def test_pulls_on_the_cpu_pass() -> None:
    found = check_pulls(CpuBackend(), ignored, TWO)
    assert found.startswith("2 shapes into 3 kinds of ranks")


@pytest.mark.parametrize("fault", [swapped, shifted])
def test_pulls_that_copy_wrongly_fail(fault: Any) -> None:
    def make(layout: RankLayout, label: str) -> CpuExchange:
        return CpuExchange(layout, label, copy=lambda parts: copy_parts(fault(parts)))

    with pytest.raises(CheckFailed, match="12 of 12 blocks pulled from 1 ranks differ"):
        check_pulls(Faulty(make), ignored, ONE)


def test_pulls_that_are_reported_too_early_fail() -> None:
    with pytest.raises(CheckFailed, match="12 of 12 blocks pulled from 1 ranks differ"):
        check_pulls(Faulty(LateExchange), ignored, ONE)


def test_a_skipped_fence_on_a_gpu_fails() -> None:
    with pytest.raises(CheckFailed, match="blocks pulled from 1 ranks differ"):
        check_pulls(played_gpu(skips_fences=True), ignored, ONE)


def test_pulls_that_write_elsewhere_too_fail() -> None:
    class Sloppy(CpuExchange):
        def begin(self, pull: Any) -> None:
            super().begin(pull)
            free = next(b for b in range(self.layout.num_blocks) if b not in pull.into)
            self.pool[free] = 1.0

    with pytest.raises(CheckFailed, match="blocks were written that nobody asked for"):
        check_pulls(Faulty(Sloppy), ignored, ONE)


class Swapping:
    """Kernels that write keys where values belong."""

    def __init__(self, kernels: Kernels, config: ModelConfig, pool: torch.Tensor) -> None:
        self._kernels, self._width = kernels, pool.shape[1] * pool.shape[5]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)

    def append(self, layer: int, qkv: torch.Tensor) -> None:
        keys, values = qkv[:, -2 * self._width : -self._width], qkv[:, -self._width :]
        keys[:], values[:] = values.clone(), keys.clone()
        self._kernels.append(layer, qkv)


class OtherLayer(Swapping):
    """Kernels that read a layer's keys from where the layer before has them."""

    def append(self, layer: int, qkv: torch.Tensor) -> None:
        self._kernels.append(0, qkv)


class Elsewhere(Swapping):
    """Kernels that write right, and once more where nobody asked for it."""

    def __init__(self, kernels: Kernels, config: ModelConfig, pool: torch.Tensor) -> None:
        super().__init__(kernels, config, pool)
        self._pool = pool

    def append(self, layer: int, qkv: torch.Tensor) -> None:
        self._kernels.append(layer, qkv)
        free = int((self._pool.flatten(1) == 0).all(1).nonzero()[0])
        self._pool[free, 0, layer, 0, 0] = qkv[0, : self._pool.shape[5]]


class OtherScale(Swapping):
    """Kernels that scale scores by the stored width of a head and not by the model's."""

    def append(self, layer: int, qkv: torch.Tensor) -> None:
        qkv[:, : -2 * self._width] *= 0.8
        self._kernels.append(layer, qkv)


def test_attention_on_the_cpu_passes() -> None:
    figures: dict[str, Any] = {}
    check_attention(CpuBackend(), figures.__setitem__, HEADS)
    assert list(figures) == ["bfloat16 64x6/2", "float16 64x6/2"]


@pytest.mark.parametrize("fault", [Swapping, OtherLayer, OtherScale])
def test_attention_with_keys_and_values_in_the_wrong_place_fails(fault: Any) -> None:
    with pytest.raises(CheckFailed, match=r"with 6 heads of 64 on 2 KV heads are off by"):
        check_attention(Faulty(alter=fault), ignored, HEADS)


def test_attention_that_writes_where_nobody_asked_for_it_fails() -> None:
    with pytest.raises(CheckFailed, match="elements of the pool are not what was appended there"):
        check_attention(Faulty(alter=Elsewhere), ignored, HEADS)


def test_pulls_of_large_blocks_that_are_slower_than_a_copy_fail() -> None:
    require_fast({256: 0.2, 2048: 0.85, 12800: 0.9}, least_share=0.8)
    with pytest.raises(CheckFailed, match="pulls of 2048 KiB reach 31% of a plain copy, 80% was"):
        require_fast({256: 0.9, 2048: 0.31, 12800: 0.9}, least_share=0.8)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Executor:
    path = write_config(tmp_path_factory.mktemp("engine") / "tiny", TINY)
    spec = spec_of(str(path), CpuBackend.dtype, max_context=256, is_dummy=True)
    return CpuBackend().executor(spec, 8 << 20, max_batch=4)


def test_tokens_that_no_engine_would_draw_are_told_from_near_ties(engine: Executor) -> None:
    judge, prompt = Driver(engine), list(range(40))
    (drawn,) = Driver(engine).greedy([prompt], 6)
    assert max(judge.gaps(prompt, drawn)) < SLACK
    wrong = [*drawn[:3], (drawn[3] + 1) % 256, *drawn[4:]]
    with pytest.raises(CheckFailed, match=r"here: sequences \[0\] of 1 go on otherwise"):
        require_likely(judge, [prompt], [wrong], [drawn], "here")
