"""Turn a GGUF file of a Llama model into an ordinary Hugging Face directory, once, at set-up.

The one module that uses transformers and gguf; both are imported when it runs, so that a service
installed without the `setup` extra still starts its workers. Weights are de-quantized to
float32 and stored as bfloat16. Run as `python -P -m gpu_workers convert-gguf FILE DIRECTORY`.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

EX_OK, EX_DATA, EX_UNAVAILABLE = 0, 65, 69

# How llama.cpp's name for a pre-tokenizer is spelled in the tokenizers library. transformers
# leaves the digit split of this one out, which changes how "a  12" is cut.
_SPLITS_DIGITS = frozenset({"smollm"})


class NotConvertible(Exception):
    """The file is not a GGUF of a model that this module knows."""


def main(argv: list[str]) -> int:
    """Convert as the command line says; the exit code says whether it worked."""
    parser = argparse.ArgumentParser(
        prog="gpu_workers convert-gguf",
        description="Write a GGUF file's Llama model as a Hugging Face directory in bfloat16.",
    )
    parser.add_argument("gguf", type=Path, metavar="FILE", help="the .gguf file to read")
    parser.add_argument("directory", type=Path, metavar="DIRECTORY", help="where to write")
    arguments = parser.parse_args(argv)
    try:
        convert(arguments.gguf, arguments.directory)
    except ModuleNotFoundError as error:
        _say(f"{error.name} is missing: pip install 'distserved[setup]'")
        return EX_UNAVAILABLE
    except (NotConvertible, OSError) as error:
        _say(f"cannot convert {arguments.gguf}: {error}")
        return EX_DATA
    return EX_OK


def convert(gguf_file: Path, directory: Path) -> None:
    """Write config, generation config, weights, tokenizer and chat template to `directory`.

    Raises:
        NotConvertible: no file, another architecture than Llama, or tensors that do not fit it.
    """
    if not gguf_file.is_file():
        raise NotConvertible("there is no such file")
    directory.mkdir(parents=True, exist_ok=True)
    _say(f"reading {gguf_file.name}")
    config = _write_config(gguf_file, directory)
    _write_weights(gguf_file, config, directory)
    _say("converting the tokenizer")
    _write_tokenizer(gguf_file, config, directory)


def unpermuted(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Undo GGUF's order of a query or key projection's rows.

    GGUF interleaves the two halves that rotary embeddings turn into each other; Hugging Face
    keeps them apart.
    """
    rows, columns = weight.shape
    pairs = weight.view(num_heads, rows // num_heads // 2, 2, columns)
    return pairs.transpose(1, 2).reshape(rows, columns)


def _write_config(gguf_file: Path, directory: Path) -> Any:
    from transformers import AutoConfig, GenerationConfig

    config = AutoConfig.from_pretrained(str(gguf_file.parent), gguf_file=gguf_file.name)
    if config.model_type != "llama":
        raise NotConvertible(f"it holds a {config.model_type} model, only llama is known")
    config.architectures = ["LlamaForCausalLM"]
    config.dtype = "bfloat16"
    config.name_or_path = ""
    config.save_pretrained(directory)
    GenerationConfig.from_model_config(config).save_pretrained(directory)
    return config


def _write_weights(gguf_file: Path, config: Any, directory: Path) -> None:
    from safetensors.torch import save_file

    tensors: dict[str, torch.Tensor] = {}
    shapes = _expected_shapes(config)
    for name, tensor in _read_tensors(gguf_file, config):
        if shapes.get(name) != tensor.shape:
            raise NotConvertible(f"tensor {name} is {tuple(tensor.shape)}, not {shapes.get(name)}")
        tensors[name] = tensor
        if len(tensors) % 50 == 0:
            _say(f"de-quantized {len(tensors)} of {len(shapes)} tensors")
    if missing := shapes.keys() - tensors.keys():
        raise NotConvertible(f"it lacks the tensors {', '.join(sorted(missing))}")
    _say(f"writing {len(tensors)} tensors")
    weights = directory / "model.safetensors"
    save_file(tensors, weights, metadata={"format": "pt"})
    weights.chmod(0o644)  # made 0600, but who fetches a model is seldom the service's own user


def _expected_shapes(config: Any) -> dict[str, torch.Size]:
    """Names and shapes of the model's parameters, from a model without memory."""
    from transformers import LlamaForCausalLM

    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    return {name: parameter.shape for name, parameter in model.named_parameters()}


def _read_tensors(gguf_file: Path, config: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of the file under its Hugging Face name, in bfloat16."""
    import gguf

    to_gguf = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    names = {to_gguf.get_name(name, (".weight",)): name for name in _expected_shapes(config)}
    for stored in gguf.GGUFReader(gguf_file).tensors:
        if stored.name not in names:
            raise NotConvertible(f"it has a tensor {stored.name} that the model has no place for")
        name = names[stored.name]
        weight = torch.tensor(gguf.dequantize(stored.data, stored.tensor_type))
        if name.endswith("q_proj.weight"):
            weight = unpermuted(weight, config.num_attention_heads)
        elif name.endswith("k_proj.weight"):
            weight = unpermuted(weight, config.num_key_value_heads)
        yield name, weight.to(torch.bfloat16).contiguous()


def _write_tokenizer(gguf_file: Path, config: Any, directory: Path) -> None:
    import gguf
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(gguf_file.parent), gguf_file=gguf_file.name)
    field = gguf.GGUFReader(gguf_file).get_field("tokenizer.ggml.pre")
    if field is not None and field.contents() in _SPLITS_DIGITS:
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    tokenizer.model_max_length = config.max_position_embeddings
    tokenizer.save_pretrained(directory)


def _say(line: str) -> None:
    sys.stderr.write(f"convert-gguf: {line}\n")
    sys.stderr.flush()
