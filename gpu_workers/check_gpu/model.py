"""Stage: a small random Llama against transformers, by teacher forcing.

Random weights have near-ties, so in 16 bit the same tokens cannot be asked for. transformers is
given our tokens instead, in fp32: at every place, ours must be about as likely as its likeliest.
"""

import tempfile
from pathlib import Path
from typing import Any

import torch

from gpu_workers.check_gpu.backend import Backend, spec_of
from gpu_workers.check_gpu.driver import Driver
from gpu_workers.check_gpu.outcome import Found, Skipped, require
from gpu_workers.check_gpu.tiny_models import TINY, prompts

NUM_TOKENS = 24
SLACK = 0.1  # of the spread of the logits at that place, which rounding to 16 bits stays well below


def check_model(backend: Backend) -> Found:
    """Greedy tokens after a few prompts."""
    try:
        import transformers
    except ImportError as error:
        raise Skipped("transformers is not installed") from error
    with tempfile.TemporaryDirectory() as directory:
        reference = _saved(transformers, Path(directory))
        spec = spec_of(directory, backend.dtype, max_context=256, is_dummy=False)
        executor = backend.executor(spec, 32 << 20, is_graphed=False, max_batch=8)
        asked = prompts(6, 90)
        drawn = Driver(executor).greedy(asked, NUM_TOKENS)
    gaps = [
        g for prompt, ours in zip(asked, drawn, strict=True) for g in _gaps(reference, prompt, ours)
    ]
    require(
        max(gaps) < SLACK,
        f"a token is {max(gaps):.3f} of the logits' spread less likely than the likeliest, at "
        f"most {SLACK} was expected",
    )
    exact = sum(gap == 0 for gap in gaps)
    return Found(f"{exact} of {len(gaps)} tokens are the likeliest, none far from it")


def _saved(transformers: Any, directory: Path) -> Any:
    """A model of the same numbers in fp32 as in ours: those that 16 bits can hold."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY)).to(torch.bfloat16)
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
