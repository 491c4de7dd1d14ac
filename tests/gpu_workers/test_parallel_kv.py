"""Between instances of any two shapes, each rank pulls its part, bit for bit, each plane once."""

import os
from collections.abc import Iterator

import pytest
import torch

from gpu_workers.cpu_exchange import CpuExchange
from gpu_workers.engine import pool_layout
from gpu_workers.models.config import ModelConfig, parse_config
from gpu_workers.step_plan import Pull
from ipc.kv_layout import RankLayout
from ipc.sharding import Shard
from ipc.vocabulary import DType, KVHandle, Parallelism, WorkerName
from tests.gpu_workers.group_driver import SHAPES, shape_name, workers

BLOCK_SIZE, EPOCH = 4, 3
SOURCE_BLOCKS, TARGET_BLOCKS = (5, 0, 2), (1, 6, 3)
KV_BYTES = 8 * BLOCK_SIZE * 2 * 3 * 4 * 8 * 2  # eight blocks of all layers and heads, or more


def model(num_kv_heads: int) -> ModelConfig:
    """Three layers, so that two stages differ."""
    raw = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": num_kv_heads,
        "max_position_embeddings": 64,
    }
    return parse_config(raw, name="tiny")


def layout(config: ModelConfig, shard: Shard) -> RankLayout:
    return pool_layout(
        config, dtype=DType.BF16, block_size=BLOCK_SIZE, kv_bytes=KV_BYTES, shard=shard
    )


def reference(config: ModelConfig) -> torch.Tensor:
    """[blocks, heads, layers, 2, P, D] of the whole model, no two planes alike."""
    whole = layout(config, config.whole)
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randint(-(1 << 15), 1 << 15, whole.shape, generator=generator)
    return numbers.to(torch.int16)


class Pools:
    """The exchanges of an instance's ranks; pools are compared as raw bits."""

    def __init__(self, config: ModelConfig, parallelism: Parallelism) -> None:
        self.shards = workers(config, parallelism)
        self.exchanges = [CpuExchange(layout(config, shard), "test") for shard in self.shards]

    def fill(self, whole: torch.Tensor) -> None:
        for exchange in self.exchanges:
            bits(exchange)[: len(whole)] = part(whole, exchange.layout)

    def map_into(self, exchange: CpuExchange) -> None:
        for shard, source in zip(self.shards, self.exchanges, strict=True):
            name = WorkerName("there", shard.stage, shard.tp_rank)
            exchange.map_peer(name, EPOCH, source.layout, os.dup(source.descriptor))

    def close(self) -> None:
        for exchange in self.exchanges:
            os.close(exchange.descriptor)


def bits(exchange: CpuExchange) -> torch.Tensor:
    return exchange.pool.view(torch.int16)


def part(whole: torch.Tensor, of: RankLayout) -> torch.Tensor:
    heads, layers = of.heads, of.layers
    return whole[:, heads.start : heads.stop, layers.start : layers.stop]


@pytest.fixture(scope="module", params=[2, 4], ids=["two-kv-heads", "four-kv-heads"])
def config(request: pytest.FixtureRequest) -> ModelConfig:
    return model(request.param)


@pytest.fixture(scope="module", params=SHAPES, ids=lambda shape: f"from-{shape_name(shape)}")
def sources(request: pytest.FixtureRequest, config: ModelConfig) -> Iterator[Pools]:
    pools = Pools(config, request.param)
    pools.fill(reference(config))
    yield pools
    pools.close()


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"to-{shape_name(shape)}")
def test_pulled_blocks_are_the_same_slices_of_the_reference(
    config: ModelConfig, sources: Pools, shape: Parallelism
) -> None:
    whole, targets = reference(config), Pools(config, shape)
    handle = KVHandle("there", EPOCH, 1, SOURCE_BLOCKS, len(SOURCE_BLOCKS) * BLOCK_SIZE)
    for exchange in targets.exchanges:
        sources.map_into(exchange)
        assert exchange.knows("there", EPOCH)
        exchange.begin(Pull(handle, TARGET_BLOCKS))
        expected = torch.zeros_like(bits(exchange))
        expected[list(TARGET_BLOCKS)] = part(whole, exchange.layout)[list(SOURCE_BLOCKS)]
        assert torch.equal(bits(exchange), expected)
        (result,) = exchange.finished()
        assert result.num_bytes == len(TARGET_BLOCKS) * exchange.layout.block_bytes
    targets.close()
