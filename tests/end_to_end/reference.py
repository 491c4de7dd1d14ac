"""What transformers says: greedy continuations, and whether it would have drawn given tokens."""

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

    @cached_property
    def continuations(self) -> list[list[int]]:
        """Greedy continuations of PROMPTS, NUM_OUTPUT tokens each, whatever they are."""
        prompts = [self.tokenizer.encode(prompt) for prompt in PROMPTS]
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        with torch.inference_mode():
            output = self.model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=NUM_OUTPUT,
                min_new_tokens=NUM_OUTPUT,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        return [row[longest:].tolist() for row in output]

    def text(self, token_ids: list[int]) -> str:
        return self.tokenizer.decode(token_ids)

    def shortfall(self, prompt: list[int], output: list[int]) -> float:
        """By teacher forcing: the largest distance of a drawn token's logit from the maximum, in
        standard deviations of its row. Zero means that every token is the argmax."""
        with torch.inference_mode():
            logits = self.model(torch.tensor([prompt + output])).logits[0]
        rows = logits[len(prompt) - 1 : -1]  # (output tokens, vocabulary)
        drawn = rows.gather(1, torch.tensor(output)[:, None])[:, 0]
        return float(((rows.max(dim=1).values - drawn) / rows.std(dim=1)).max())
