"""The sizes of models: parameters, keys and values per token, and how they may be cut."""

from pathlib import Path

import msgspec
import orjson
import pytest

from ipc.vocabulary import Parallelism
from planner.errors import InfeasibleShape, PlannerError
from planner.model_catalog import CATALOG, model_shape

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("name", "kv_bytes"),
    [
        ("opt-13b", 819_200),
        ("opt-66b", 2_359_296),
        ("opt-175b", 4_718_592),
        ("llama-2-7b", 524_288),
        ("llama-3-8b", 131_072),
        ("mixtral-8x7b", 131_072),
        ("llama-3-70b", 327_680),
        ("qwen3-32b", 262_144),
        ("qwen3-30b-a3b", 98_304),
        ("deepseek-v3", 70_272),
        ("smollm2-135m", 23_040),
    ],
)
def test_keys_and_values_of_a_token_take_as_many_bytes_as_published(
    name: str, kv_bytes: int
) -> None:
    assert model_shape(name).kv_bytes_per_token == kv_bytes


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama-2-7b", 6.738),
        ("llama-3-8b", 8.030),
        ("llama-3-70b", 70.554),
        ("mixtral-8x7b", 46.703),
        ("qwen3-32b", 32.762),
        ("qwen3-30b-a3b", 30.532),
        ("deepseek-v3", 671.026),
        ("smollm2-135m", 0.1345),
        ("opt-13b", 12.853),
    ],
)
def test_parameters_add_up_to_the_published_count(name: str, billions: float) -> None:
    assert model_shape(name).num_params / 1e9 == pytest.approx(billions, rel=5e-4)


def test_a_model_is_known_under_its_owners_name_too() -> None:
    assert model_shape("facebook/OPT-13B") is CATALOG["opt-13b"]
    assert model_shape("meta-llama/Meta-Llama-3-8B-Instruct") is CATALOG["llama-3-8b"]


def test_an_unknown_model_gets_one_sentence_with_the_known_ones() -> None:
    with pytest.raises(PlannerError, match="did you mean opt-13b") as caught:
        model_shape("opt-13")
    assert "\n" not in str(caught.value)


def test_a_models_directory_gives_the_same_shape_as_its_name() -> None:
    directory = ROOT / "models" / "smollm2"
    if not directory.is_dir():
        pytest.skip("the default model is not here")
    read, known = model_shape(str(directory)), CATALOG["smollm2-135m"]
    assert (read.num_params, read.kv_bytes_per_token) == (known.num_params, 23_040)


def written(folder: Path, **fields: object) -> str:
    path = folder / "config.json"
    path.write_bytes(orjson.dumps(fields))
    return str(path)


def test_a_configuration_with_experts_and_latents_is_read(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        model_type="deepseek_v3",
        num_hidden_layers=61,
        hidden_size=7168,
        num_attention_heads=128,
        num_key_value_heads=128,
        vocab_size=129280,
        intermediate_size=18432,
        n_routed_experts=256,
        num_experts_per_tok=8,
        moe_intermediate_size=2048,
        n_shared_experts=1,
        first_k_dense_replace=3,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        qk_nope_head_dim=128,
        v_head_dim=128,
        quantization_config={"quant_method": "fp8"},
    )
    shape, known = model_shape(path), CATALOG["deepseek-v3"]
    assert shape.num_params == known.num_params
    assert shape.kv_bytes_per_token == known.kv_bytes_per_token
    assert (shape.weight_bits, shape.compute_bits) == (8, 8)


def test_a_broken_configuration_names_the_file_and_the_field(tmp_path: Path) -> None:
    path = written(tmp_path, model_type="llama", num_hidden_layers="many")
    with pytest.raises(PlannerError, match=r"config.json.*num_hidden_layers"):
        model_shape(path)


def test_a_configuration_without_heads_is_refused_by_field(tmp_path: Path) -> None:
    """A bug: sizes of zero ended in a division by zero."""
    fields = {"num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 0, "vocab_size": 9}
    with pytest.raises(PlannerError, match=r">= 1 - at `\$\.num_attention_heads`"):
        model_shape(written(tmp_path, model_type="llama", **fields))


def test_a_configuration_without_an_mlp_is_refused_by_field(tmp_path: Path) -> None:
    fields = {"num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 9}
    with pytest.raises(PlannerError, match="intermediate_size"):
        model_shape(written(tmp_path, model_type="llama", **fields))


@pytest.mark.parametrize(
    ("name", "parallelism", "reason"),
    [
        ("opt-13b", Parallelism(3, 1), "40 attention heads do not divide by 3"),
        ("smollm2-135m", Parallelism(9, 1), "width of 1536 does not divide by 9"),
        ("opt-13b", Parallelism(1, 41), "only 40 layers"),
        ("opt-13b", Parallelism(0, 1), "degrees start at 1"),
        ("qwen3-32b", Parallelism(16, 1), ""),
    ],
)
def test_a_shape_that_cannot_be_says_why(name: str, parallelism: Parallelism, reason: str) -> None:
    shape = model_shape(name)
    if not reason:
        shape.check(parallelism)
        return
    with pytest.raises(InfeasibleShape, match=reason):
        shape.check(parallelism)


def test_more_ranks_than_kv_heads_hold_one_head_each() -> None:
    shape = model_shape("llama-3-8b")
    per_rank = [shape.kv_elements_per_layer(tp) for tp in (1, 4, 8, 16)]
    assert per_rank == [2048, 512, 256, 256]


def test_heads_that_kv_heads_do_not_divide_are_refused() -> None:
    """33 query heads over 7 KV heads were accepted, and simulated."""
    odd = msgspec.structs.replace(model_shape("llama-3-8b"), num_heads=33, num_kv_heads=7)
    with pytest.raises(InfeasibleShape, match="33 attention heads cannot share 7 KV heads evenly"):
        odd.check(Parallelism())


def test_a_latent_is_whole_on_every_rank() -> None:
    assert {model_shape("deepseek-v3").kv_elements_per_layer(tp) for tp in (1, 2, 8)} == {576}


def test_quantised_weights_and_cache_are_separate_knobs() -> None:
    shape = model_shape("llama-3-8b")
    assert shape.quantised(weight_bits=4).kv_bytes_per_token == shape.kv_bytes_per_token
    assert shape.quantised(weight_bits=4, kv_bits=8).kv_bytes_per_token == 65_536
