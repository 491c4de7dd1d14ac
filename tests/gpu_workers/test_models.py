"""The models compute what transformers computes, however the tokens are cut into steps."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from gpu_workers.engine import TORCH_DTYPES
from gpu_workers.errors import ModelError
from gpu_workers.models.config import RopeKind, parse_config, read_config
from gpu_workers.models.rope import rope_table
from ipc.vocabulary import DType
from tests.gpu_workers.checkpoints import CHECKPOINTS, llama_gqa
from tests.gpu_workers.driving import Driver, greedy

NUM_NEW = 16
LENGTHS = (1, 5, 16, 33, 64, 71)

# In 16 bit a greedy token may differ where two logits nearly tie. Every token that the engine
# draws must then have, in the fp32 reference, a logit this close to the largest (in units of the
# row's standard deviation).
TEACHER_TOLERANCE = {DType.BF16: 0.10, DType.FP16: 0.02}


@pytest.fixture(scope="module", params=CHECKPOINTS)
def model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return CHECKPOINTS[request.param](tmp_path_factory.mktemp(request.param))


@pytest.fixture(params=["fastest", "torch"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels that this machine would serve with, and the ones that serve anywhere."""
    if request.param == "torch":
        monkeypatch.setenv("DISTSERVE_KERNELS", "torch")


@pytest.fixture(scope="module")
def reference(model_dir: Path) -> PreTrainedModel:
    return load_reference(model_dir)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 256, (n,), generator=generator).tolist() for n in LENGTHS]


@pytest.fixture(scope="module")
def expected(reference: PreTrainedModel, prompts: list[list[int]]) -> list[list[int]]:
    return [reference_greedy(reference, prompt, NUM_NEW) for prompt in prompts]


@pytest.mark.usefixtures("kernels")
def test_greedy_tokens_equal_the_references_alone_and_in_chunks(
    model_dir: Path, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    driver = Driver(model_dir)
    assert [driver.generate(prompt, NUM_NEW) for prompt in prompts] == expected
    assert [driver.generate(prompt, NUM_NEW, chunk=7) for prompt in prompts] == expected


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("block_size", [4, 16, 32])
def test_greedy_tokens_equal_the_references_in_a_batch(
    model_dir: Path, prompts: list[list[int]], expected: list[list[int]], block_size: int
) -> None:
    driver = Driver(model_dir, block_size=block_size)
    assert generate_together(driver, prompts) == expected


@pytest.mark.usefixtures("kernels")
def test_prompts_chunks_and_decodes_share_a_step(
    model_dir: Path, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    driver = Driver(model_dir, block_size=4)
    decoding, chunked, fresh = (driver.add(prompts[i], greedy()) for i in (3, 5, 4))
    drawn = {decoding: [*driver.prefill(decoding, LENGTHS[3]).token_ids], chunked: [], fresh: []}
    driver.step((chunked, 13, False))
    for rows in (
        ((chunked, 29, False), (decoding, 1, True), (fresh, 64, True)),
        ((fresh, 1, True), (chunked, 28, False), (decoding, 1, True)),
        ((decoding, 1, True), (chunked, 1, True)),
    ):
        for sequence, row in driver.step(*rows).items():
            drawn[sequence] += row.token_ids
    assert drawn[decoding] == expected[3][:4]
    assert drawn[fresh] == expected[4][:2]
    assert drawn[chunked] == expected[5][:1]


@pytest.mark.usefixtures("kernels")
def test_a_sequence_goes_on_after_prompt_and_output_are_prefilled_again(
    model_dir: Path, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    driver = Driver(model_dir)
    resumed = driver.add(prompts[3], greedy(), output=expected[3][:6])
    tokens = [*driver.prefill(resumed, LENGTHS[3] + 6, chunk=11).token_ids]
    while len(tokens) < NUM_NEW - 6:
        tokens += driver.step((resumed, 1, True))[resumed].token_ids
    assert tokens == expected[3][6:]


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", [DType.BF16, DType.FP16])
def test_sixteen_bit_tokens_are_near_the_references_best(
    model_dir: Path, reference: PreTrainedModel, prompts: list[list[int]], dtype: DType
) -> None:
    drawn = generate_together(Driver(model_dir, dtype=dtype), prompts)
    for prompt, tokens in zip(prompts, drawn, strict=True):
        assert worst_gap(reference, prompt, tokens) <= TEACHER_TOLERANCE[dtype]


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("head_dim", [80, 128])
def test_other_head_widths_are_computed_too(
    tmp_path: Path, prompts: list[list[int]], head_dim: int
) -> None:
    model_dir = llama_gqa(tmp_path, head_dim=head_dim)
    reference = load_reference(model_dir)
    expected = [reference_greedy(reference, prompt, NUM_NEW) for prompt in prompts]
    assert generate_together(Driver(model_dir), prompts) == expected


def test_plain_weights_give_the_same_tokens_as_packed_ones(
    tmp_path: Path, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model_dir = llama_gqa(tmp_path)
    monkeypatch.setenv("DISTSERVE_KERNELS", "torch")
    packed = Driver(model_dir)
    monkeypatch.setattr("gpu_workers.cpu_kernels.can_pack", lambda dtype: False)
    plain = Driver(model_dir)
    assert (packed.executor.kernels_name, plain.executor.kernels_name) == ("torch-mkldnn", "torch")
    assert generate_together(plain, prompts) == generate_together(packed, prompts)


ROPE = {
    "default": {"rope_type": "default", "rope_theta": 5e4},
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
        "rope_theta": 1e4,
    },
    "yarn": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "rope_theta": 1e4,
    },
    "yarn-mscale": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "mscale": 0.7,
        "mscale_all_dim": 1.2,
        "truncate": False,
        "rope_theta": 1e4,
    },
}


@pytest.mark.parametrize("name", ROPE)
def test_rotary_angles_equal_the_references(name: str) -> None:
    config = LlamaConfig(head_dim=64, max_position_embeddings=512, rope_parameters=ROPE[name])
    raw = {**config.to_dict(), "architectures": ["LlamaForCausalLM"]}
    rope = parse_config(raw, name="m").rope
    assert rope is not None
    table = rope_table(rope, 64, 512)
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(512)[None])
    torch.testing.assert_close(table[:, 0], cos[0, :, :32], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(table[:, 1], sin[0, :, :32], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["llama3", "yarn"])
def test_scaled_rotation_gives_the_references_tokens(
    tmp_path: Path, prompts: list[list[int]], name: str
) -> None:
    model_dir = llama_gqa(tmp_path, rope_parameters=ROPE[name])
    reference = load_reference(model_dir)
    expected = [reference_greedy(reference, prompt, NUM_NEW) for prompt in prompts]
    assert generate_together(Driver(model_dir), prompts) == expected


def test_the_older_spelling_of_rotary_scaling_means_the_same() -> None:
    scaling = {key: value for key, value in ROPE["llama3"].items() if key != "rope_theta"}
    scaling["type"] = scaling.pop("rope_type")
    old = parse_config(raw_llama(rope_theta=1e4, rope_scaling=scaling), name="m")
    new = parse_config(raw_llama(rope_parameters=ROPE["llama3"]), name="m")
    assert old == new
    assert old.rope is not None
    assert old.rope.kind is RopeKind.LLAMA3


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "longrope"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"sliding_window": 4096, "architectures": ["MistralForCausalLM"]}, "4096"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
        ({"num_attention_heads": 5}, "5 attention heads"),
        ({"rope_scaling": {"type": "linear"}}, "factor"),
        ({"hidden_size": None}, "hidden_size"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"architectures": 5}, "architecture 5 is not supported"),
        ({"rope_parameters": "default"}, "rope_parameters .* is no JSON object"),
        ({"rope_parameters": {"rope_theta": float("nan")}}, "theta"),
        ({"rms_norm_eps": float("inf")}, "norm_eps"),
        ({"max_position_embeddings": -1}, "max_positions"),
        ({"vocab_size": 10**30}, "vocab_size"),
    ],
)
def test_what_cannot_be_computed_is_refused_by_name(changes: dict[str, object], named: str) -> None:
    with pytest.raises(ModelError, match=named):
        parse_config(raw_llama(**changes), name="m")


def test_a_directory_without_a_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json cannot be read: No such file"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(ModelError, match="not JSON"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[]", encoding="utf-8")
    with pytest.raises(ModelError, match="holds no JSON object"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[" * 100_000, encoding="utf-8")
    with pytest.raises(ModelError, match="not JSON"):
        read_config(tmp_path)


def test_bytes_of_kv_per_token_count_both_halves_of_every_layer() -> None:
    config = parse_config(raw_llama(num_key_value_heads=2, head_dim=64), name="m")
    assert config.kv_bytes_per_token(DType.BF16) == 2 * 3 * 2 * 64 * 2


def raw_llama(**changes: object) -> dict[str, object]:
    raw: dict[str, object] = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 264,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 512,
    }
    raw.update(changes)
    return {key: value for key, value in raw.items() if value is not None}


def load_reference(model_dir: Path) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=TORCH_DTYPES[DType.FP32])
    return model.eval()


def reference_greedy(model: PreTrainedModel, prompt: list[int], num_tokens: int) -> list[int]:
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=None,
    )
    return out[0, len(prompt) :].tolist()


def generate_together(driver: Driver, prompts: list[list[int]]) -> list[list[int]]:
    sequences = [driver.add(prompt, greedy()) for prompt in prompts]
    rows = [(s, len(p), True) for s, p in zip(sequences, prompts, strict=True)]
    drawn: list[list[int]] = [[] for _ in prompts]
    for _ in range(NUM_NEW):
        results = driver.step(*rows)
        for tokens, sequence in zip(drawn, sequences, strict=True):
            tokens += results[sequence].token_ids
        rows = [(sequence, 1, True) for sequence in sequences]
    for sequence in sequences:
        driver.remove(sequence)
    return drawn


@torch.no_grad()
def worst_gap(model: PreTrainedModel, prompt: list[int], tokens: list[int]) -> float:
    """How far the drawn tokens' logits lie below the largest, in standard deviations."""
    logits = model(torch.tensor([[*prompt, *tokens[:-1]]])).logits[0, len(prompt) - 1 :]
    own = logits[torch.arange(len(tokens)), torch.tensor(tokens)]
    return float(((logits.max(dim=-1).values - own) / logits.std(dim=-1)).max())
