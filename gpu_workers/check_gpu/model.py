"""Stage: small random Llamas against transformers, by teacher forcing.

Random weights have near-ties, so in 16 bit the same tokens cannot be asked for. transformers is
given our tokens instead, in fp32: at every place, ours must be about as likely as its likeliest.
"""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from gpu_workers.check_gpu.backend import Backend, spec_of
from gpu_workers.check_gpu.driver import Driver
from gpu_workers.check_gpu.outcome import Note, Skipped, require
from gpu_workers.check_gpu.tiny_models import MODELS, prompts

NUM_TOKENS = 24
KV_BYTES = 64 << 20
NAMES = {True: ("tiny", "128 wide", "smollm2"), False: ("tiny",)}
SLACK = 0.1  # of the spread of the logits at that place, which rounding to 16 bits stays well below


def check_model(backend: Backend, note: Note, names: Sequence[str] = ()) -> str:
    """Greedy tokens after a few prompts, of each of those models."""
    try:
        import transformers
    except ImportError as error:
        raise Skipped("transformers is not installed") from error
    gaps = []
    for name in names or NAMES[backend.is_gpu]:
        gaps += _checked(backend, note, transformers, name)
    exact = sum(gap == 0 for gap in gaps)
    return f"{exact} of {len(gaps)} tokens are the likeliest, none far from it"


def _checked(backend: Backend, note: Note, transformers: Any, name: str) -> list[float]:
    """Of one model, how far each of our tokens is from the likeliest."""
    with tempfile.TemporaryDirectory() as directory:
        reference = _saved(transformers, Path(directory), MODELS[name])
        spec = spec_of(directory, backend.dtype, max_context=256, is_dummy=False)
        executor = backend.eager(backend.executor(spec, KV_BYTES, max_batch=8))
        asked = prompts(6, 90)
        drawn = Driver(executor).greedy(asked, NUM_TOKENS)
    gaps = [
        g for prompt, ours in zip(asked, drawn, strict=True) for g in _gaps(reference, prompt, ours)
    ]
    note(name, {"exact": sum(gap == 0 for gap in gaps), "of": len(gaps), "largest gap": max(gaps)})
    require(
        max(gaps) < SLACK,
        f"{name}: a token is {max(gaps):.3f} of the logits' spread less likely than the likeliest, "
        f"at most {SLACK} was expected",
    )
    return gaps


def _saved(transformers: Any, directory: Path, shape: Mapping[str, Any]) -> Any:
    """A model of the same numbers in fp32 as in ours: those that 16 bits can hold."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**shape)
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(directory)
    return model.float().eval()


def _gaps(reference: Any, prompt: list[int], ours: list[int]) -> list[float]:
    """At each of our tokens: how far its logit is below the largest, in spreads of all."""
    with torch.inference_mode():
        logits = reference(torch.tensor([prompt + ours])).logits[0].float()
    gaps = []
    for place, token in enumerate(ours, start=len(prompt) - 1):
        row = logits[place]
        gaps.append(float((row.max() - row[token]) / row.std()))
    return gaps
