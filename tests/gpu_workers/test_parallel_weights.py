"""A worker reads its slices of the tensors it holds, and nothing else."""

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from gpu_workers.collectives import Alone
from gpu_workers.engine import EngineSpec, PrivatePool, build_kernels, open_weights, pool_layout
from gpu_workers.errors import ModelError
from gpu_workers.models.config import read_config
from gpu_workers.models.layers import Loader
from gpu_workers.models.registry import build_model, held_names, weight_shapes
from gpu_workers.weights import Cut, DummyWeights, SafetensorsWeights, WeightSource
from ipc.kv_layout import Span
from ipc.sharding import Shard
from ipc.vocabulary import DType, Parallelism
from tests.gpu_workers.checkpoints import CHECKPOINTS
from tests.gpu_workers.divisible import divisible
from tests.gpu_workers.group_driver import DIVIDED, build_rank, shape_name, workers

SHAPES = {"words": (10, 6), "matrix": (8, 12), "vector.bias": (8,), "norm": (8,)}
CUTS = [
    ("matrix", Cut(0, Span(2, 5))),
    ("matrix", Cut(1, Span(4, 12))),
    ("vector.bias", Cut(0, Span(6, 8))),
    ("norm", Cut(0, Span(0, 4))),
]


class Recorder:
    """Passes tensors on and remembers what was taken."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self.taken: dict[str, torch.Tensor] = {}
        self.num_takes = 0

    def take(self, name: str, cut: Cut | None = None) -> torch.Tensor:
        self.num_takes += 1
        self.taken[name] = self._source.take(name, cut)
        return self.taken[name]


@pytest.fixture(scope="module", params=CHECKPOINTS)
def model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return divisible(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture
def stored(tmp_path: Path) -> SafetensorsWeights:
    """A file of every kind of tensor, with weights that are all different."""
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    return SafetensorsWeights(tmp_path, SHAPES, torch.float32)


def read_by(model_dir: Path, shard: Shard) -> tuple[Recorder, int]:
    """What a rank takes when its model is built, and how many bytes of the files it reads."""
    config = read_config(model_dir)
    layout = pool_layout(config, dtype=DType.FP32, block_size=16, kv_bytes=1 << 20, shard=shard)
    spec = EngineSpec(
        model_dir=str(model_dir), dtype=DType.FP32, max_context_tokens=64, shard=shard
    )
    weights = open_weights(config, spec, lambda fraction: None)
    assert isinstance(weights, SafetensorsWeights)
    kernels = build_kernels(config, PrivatePool(layout).pool, 64, shard)
    recorder = Recorder(weights)
    build_model(Loader(config, kernels, recorder, shard, Alone()), kernels)
    return recorder, weights.num_bytes


@pytest.mark.parametrize(("name", "cut"), CUTS)
def test_a_part_is_that_part_of_the_file_and_of_no_more_bytes(
    stored: SafetensorsWeights, name: str, cut: Cut
) -> None:
    part = stored.take(name, cut)
    assert stored.num_bytes == part.nbytes
    whole = stored.take(name)
    assert torch.equal(part, whole.narrow(cut.dim, cut.span.start, cut.span.size))
    assert part.is_contiguous()


@pytest.mark.parametrize(("name", "cut"), CUTS)
def test_a_part_of_dummy_weights_has_the_numbers_of_the_whole(name: str, cut: Cut) -> None:
    part, whole = (DummyWeights(SHAPES, torch.float32).take(name, c) for c in (cut, None))
    assert torch.equal(part, whole.narrow(cut.dim, cut.span.start, cut.span.size))


def test_what_lies_beyond_the_vocabulary_is_zero_and_not_read(stored: SafetensorsWeights) -> None:
    sources: list[WeightSource] = [stored, DummyWeights(SHAPES, torch.float32)]
    for source in sources:
        words = source.take("words")
        last, beyond = (source.take("words", Cut(0, Span(*ends))) for ends in ((8, 12), (12, 16)))
        assert torch.equal(last[:2], words[8:])
        assert not last[2:].any()
        assert beyond.shape == (4, 6)
        assert not beyond.any()
    assert stored.num_bytes == (10 + 2) * 6 * 4


@pytest.mark.parametrize("shape", [Parallelism(2, 1), Parallelism(4, 2)], ids=shape_name)
def test_each_rank_takes_the_tensors_it_holds_once_and_all_of_them_are_held(
    model_dir: Path, shape: Parallelism
) -> None:
    config = read_config(model_dir)
    everything = set[str]()
    for shard in workers(config, shape):
        recorder, _ = read_by(model_dir, shard)
        # Biases of products that are summed belong to tp rank 0.
        summed = {n for n in held_names(config, shard) if is_summed(n) and n.endswith("bias")}
        expected = set(held_names(config, shard)) - (summed if shard.tp_rank else set())
        assert recorder.taken.keys() == expected
        assert recorder.num_takes == len(expected)
        everything |= expected
    assert everything == weight_shapes(config).keys()


@pytest.mark.parametrize("tp", [2, 4])
def test_ranks_of_a_stage_read_each_byte_once_but_for_what_they_share(
    model_dir: Path, tp: int
) -> None:
    config = read_config(model_dir)
    num_bytes = sum(read_by(model_dir, shard)[1] for shard in workers(config, Parallelism(tp)))
    copies = {name: num_copies(name, tp, config.num_kv_heads) for name in weight_shapes(config)}
    shapes = weight_shapes(config).items()
    assert num_bytes == sum(4 * math.prod(shape) * copies[name] for name, shape in shapes)


def num_copies(name: str, tp: int, num_kv_heads: int) -> int:
    """How many ranks of a stage read any one element of a tensor."""
    if any(part in name for part in ("norm.", "norm_", "embed_positions", "project_")):
        return tp
    if "k_proj" in name or "v_proj" in name:
        return max(1, tp // num_kv_heads)
    return 1


def is_summed(name: str) -> bool:
    return any(part in name for part in ("o_proj", "out_proj", "down_proj", "fc2"))


def test_parts_of_two_ranks_make_the_tensor(model_dir: Path) -> None:
    stored = load_file(model_dir / "model.safetensors")
    config = read_config(model_dir)
    parts = [read_by(model_dir, shard)[0].taken for shard in workers(config, Parallelism(2))]
    layer = next(name for name in stored if ".0." in name).split(".0.")[0] + ".0."
    for name in weight_shapes(config):
        if not name.startswith(layer) or name.endswith("bias"):
            continue
        left, right = (part[name] for part in parts)
        if "norm" in name:
            assert torch.equal(left, stored[name])
            assert torch.equal(right, stored[name])
        else:
            dim = 1 if is_summed(name) else 0
            assert torch.equal(torch.cat([left, right], dim), stored[name])


def test_a_wrong_directory_is_refused_whole_by_every_rank(model_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((model_dir / "config.json").read_bytes())
    tensors = load_file(model_dir / "model.safetensors")
    lost = next(name for name in sorted(tensors) if ".layers.0." in name)
    del tensors[lost]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    for shard in workers(read_config(tmp_path), Parallelism(1, 2)):
        with pytest.raises(ModelError, match=f"1 missing: {lost}"):
            build_rank(tmp_path, shard, Alone())


def test_progress_of_a_shard_runs_up_to_one(model_dir: Path) -> None:
    config, seen = read_config(model_dir), list[float]()
    shard = config.shard(Parallelism(2, 2), 1, 0)
    spec = EngineSpec(
        model_dir=str(model_dir), dtype=DType.FP32, max_context_tokens=64, shard=shard
    )
    source = open_weights(config, spec, seen.append)
    for name in held_names(config, shard):
        source.take(name)
    assert seen == sorted(seen)
    assert seen[-1] == 1.0


@pytest.mark.parametrize("shape", DIVIDED, ids=shape_name)
def test_all_ranks_of_an_instance_have_the_same_number_of_blocks_and_none_has_too_many(
    model_dir: Path, shape: Parallelism
) -> None:
    config, kv_bytes = read_config(model_dir), 1 << 20
    layouts = [
        pool_layout(config, dtype=DType.BF16, block_size=16, kv_bytes=kv_bytes, shard=shard)
        for shard in workers(config, shape)
    ]
    assert len({layout.num_blocks for layout in layouts}) == 1
    largest = max(layouts, key=lambda layout: layout.block_bytes)
    assert largest.pool_bytes <= kv_bytes < largest.pool_bytes + largest.block_bytes
