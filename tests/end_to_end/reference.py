"""What transformers says of given tokens: whether it would have drawn them."""

from functools import cached_property
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from daemon.text import Tokenizer

PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n    ",
    "Water boils at a temperature of",
    "The three primary colours are",
    "To bake a loaf of bread, you first need to",
    "In 1969, Neil Armstrong",
    "Photosynthesis is the process by which",
    "The quick brown fox",
    "Dear hiring manager,\n\nI am writing to",
    "A triangle with three equal sides is called",
    "The largest planet in our solar system is",
    "Roses are red, violets are",
    "SELECT name, age FROM users WHERE",
    "The main difference between a virus and a bacterium is",
    "To be, or not to be, that is",
    "La capitale de l'Espagne est",
    "If you mix blue and yellow paint, you get",
    "The theory of relativity was proposed by",
    "Question: What is the tallest mountain on Earth?\nAnswer:",
)
NUM_OUTPUT = 64


class Reference:
    """transformers' own model of a directory, in fp32."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.tokenizer = Tokenizer.from_directory(directory)

    @cached_property
    def model(self) -> PreTrainedModel:
        torch.set_num_threads(2)
        return AutoModelForCausalLM.from_pretrained(self.directory, dtype=torch.float32).eval()

    def shortfalls(self, prompts: list[list[int]], outputs: list[list[int]]) -> list[float]:
        """By teacher forcing, for each output: the largest distance of one of its tokens' logit
        from the maximum, in standard deviations of the row. 0 says that all are the argmax."""
        rows = [prompt + output for prompt, output in zip(prompts, outputs, strict=True)]
        longest = max(map(len, rows))
        # Attention is causal, so padding on the right changes nothing before it.
        ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
        with torch.inference_mode():
            logits = self.model(ids).logits
        return [
            _shortfall(logits[i, len(prompt) - 1 : len(rows[i]) - 1], torch.tensor(outputs[i]))
            for i, prompt in enumerate(prompts)
        ]


def _shortfall(logits: torch.Tensor, drawn: torch.Tensor) -> float:
    """`logits` is [output tokens, vocabulary], `drawn` [output tokens]."""
    missing = logits.max(dim=1).values - logits.gather(1, drawn[:, None])[:, 0]
    return float((missing / logits.std(dim=1)).max())
