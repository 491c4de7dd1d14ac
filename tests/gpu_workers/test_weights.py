"""Weights are exactly the model's, wherever the files put them, or the error says what is wrong."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from gpu_workers.engine import EngineSpec, PrivatePool, build_executor, open_weights, pool_layout
from gpu_workers.errors import ModelError
from gpu_workers.models.config import read_config
from gpu_workers.models.registry import weight_shapes
from gpu_workers.weights import DummyWeights
from ipc.messages import LoadFormat
from ipc.vocabulary import DType
from tests.gpu_workers.checkpoints import llama_gqa, opt_pre_norm
from tests.gpu_workers.driving import Driver

PROMPT = list(b"weights")


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return llama_gqa(tmp_path / "model")


def rewrite(model_dir: Path, change: dict[str, torch.Tensor | None]) -> None:
    """Change, add or (None) drop tensors of the checkpoint."""
    file = model_dir / "model.safetensors"
    tensors = {**load_file(file), **change}
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, file, metadata={"format": "pt"})


def test_missing_and_left_over_names_are_listed(model_dir: Path) -> None:
    layer = "model.layers.1.self_attn"
    rewrite(model_dir, {f"{layer}.q_proj.weight": None, f"{layer}.q_norm.weight": torch.ones(64)})
    with pytest.raises(ModelError) as caught:
        Driver(model_dir)
    assert f"1 missing: {layer}.q_proj.weight" in str(caught.value)
    assert f"1 left over: {layer}.q_norm.weight" in str(caught.value)


def test_a_long_list_of_names_is_cut(model_dir: Path) -> None:
    rewrite(model_dir, {f"adapter.{i}": torch.ones(1) for i in range(20)})
    with pytest.raises(ModelError, match=r"20 left over: adapter\.0, .* and 12 more"):
        Driver(model_dir)


def test_a_tied_head_and_rotary_frequencies_may_be_there(model_dir: Path) -> None:
    expected = Driver(model_dir).generate(PROMPT, 4)
    extra = {"lm_head.weight": torch.zeros(264, 96)}
    extra["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(32)
    rewrite(model_dir, dict(extra))
    assert Driver(model_dir).generate(PROMPT, 4) == expected


def test_another_shape_is_refused_with_both_shapes(model_dir: Path) -> None:
    rewrite(model_dir, {"model.norm.weight": torch.ones(95)})
    with pytest.raises(ModelError, match=r"model\.norm\.weight has shape \(95,\).*\(96,\)"):
        Driver(model_dir)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_one_weight_that_is_no_number_is_refused_with_its_tensor(
    model_dir: Path, number: float
) -> None:
    norm = torch.ones(96)
    norm[7] = number
    rewrite(model_dir, {"model.norm.weight": norm})
    with pytest.raises(ModelError, match=r"model\.norm\.weight holds numbers that are not finite"):
        Driver(model_dir)


def test_whole_numbers_are_no_weights(model_dir: Path) -> None:
    rewrite(model_dir, {"model.norm.weight": torch.ones(96, dtype=torch.int16)})
    with pytest.raises(ModelError, match=r"model\.norm\.weight is stored as I16, and only BF16"):
        Driver(model_dir)


@pytest.mark.parametrize(
    "text", ["[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}', "{"]
)
def test_an_index_that_is_none_is_refused_with_its_file(model_dir: Path, text: str) -> None:
    (model_dir / "model.safetensors.index.json").write_text(text, encoding="utf-8")
    with pytest.raises(ModelError, match=r"index\.json cannot be read as an index of safetensors"):
        Driver(model_dir)


def test_shards_and_their_index_give_the_same_model(model_dir: Path) -> None:
    expected = Driver(model_dir).generate(PROMPT, 4)
    single = model_dir / "model.safetensors"
    tensors = load_file(single)
    names = sorted(tensors)
    shards = {"model-1-of-2.safetensors": names[::2], "model-2-of-2.safetensors": names[1::2]}
    for file, held in shards.items():
        save_file({name: tensors[name] for name in held}, model_dir / file)
    single.unlink()
    weight_map = {name: file for file, held in shards.items() for name in held}
    index = model_dir / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")
    assert Driver(model_dir).generate(PROMPT, 4) == expected
    (model_dir / "model-2-of-2.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model-2-of-2\.safetensors is not there"):
        Driver(model_dir)


def test_opt_files_with_and_without_the_models_prefix_are_the_same(tmp_path: Path) -> None:
    model_dir = opt_pre_norm(tmp_path)
    expected = Driver(model_dir).generate(PROMPT, 4)
    tensors = load_file(model_dir / "model.safetensors")
    bare = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    assert bare.keys() != tensors.keys()
    save_file(bare, model_dir / "model.safetensors")
    assert Driver(model_dir).generate(PROMPT, 4) == expected


def test_a_directory_without_safetensors_says_so(model_dir: Path) -> None:
    file = model_dir / "model.safetensors"
    file.rename(model_dir / "pytorch_model.bin")
    with pytest.raises(ModelError, match="read from safetensors only"):
        Driver(model_dir)
    file.write_bytes(b"not a tensor file")
    with pytest.raises(ModelError, match="cannot be read"):
        Driver(model_dir)


def test_progress_runs_up_to_one(model_dir: Path) -> None:
    config, seen = read_config(model_dir), list[float]()
    spec = EngineSpec(model_dir=str(model_dir), dtype=DType.BF16, max_context_tokens=64)
    layout = pool_layout(config, dtype=DType.BF16, block_size=16, kv_bytes=1 << 20)
    build_executor(config, spec, PrivatePool(layout), progress=seen.append)
    assert seen == sorted(seen)
    assert seen[-1] == 1.0
    assert len(seen) == len(weight_shapes(config))


def test_a_context_longer_than_the_model_takes_is_refused(model_dir: Path) -> None:
    config = read_config(model_dir)
    spec = EngineSpec(model_dir=str(model_dir), dtype=DType.FP32, max_context_tokens=4096)
    layout = pool_layout(config, dtype=DType.FP32, block_size=16, kv_bytes=1 << 20)
    with pytest.raises(ModelError, match="takes 512 tokens, a context of 4096"):
        build_executor(config, spec, PrivatePool(layout))
    with pytest.raises(ModelError, match="no block"):
        pool_layout(config, dtype=DType.FP32, block_size=16, kv_bytes=1000)


def test_dummy_weights_need_no_files_and_repeat_for_a_seed(model_dir: Path) -> None:
    config = read_config(model_dir)
    (model_dir / "model.safetensors").unlink()
    spec = EngineSpec(
        model_dir=str(model_dir),
        dtype=DType.BF16,
        load_format=LoadFormat.DUMMY,
        max_context_tokens=64,
    )
    name = "model.layers.0.mlp.up_proj.weight"
    first, again = (open_weights(config, spec, lambda f: None).take(name) for _ in range(2))
    other = DummyWeights(weight_shapes(config), torch.bfloat16, seed=1).take(name)
    assert first.dtype == torch.bfloat16
    assert first.shape == (128, 96)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert 0.5 < float(first.float().std()) * 96**0.5 < 1.5


@pytest.mark.parametrize("name", ["model.layers.0.mlp.up_proj.weight", "model.norm.weight"])
def test_dummy_weights_are_made_on_the_device_that_is_to_have_them(
    model_dir: Path, name: str
) -> None:
    """Made on the host and sent over, the 16 GB of an 8B model took most of a check's time."""
    shapes, there = weight_shapes(read_config(model_dir)), torch.device("meta")
    found = DummyWeights(shapes, torch.bfloat16, device=there).take(name)
    assert (found.device.type, tuple(found.shape)) == ("meta", shapes[name])
