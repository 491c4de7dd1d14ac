"""How often bf16 goes on in other words after a replay, beside transformers' own batches 1 and 8.

Greedy answers to the same prompts. Ours: undisturbed, alone and eight together; then each prefilled
again with the tokens it had at a random place, as after a worker's death, and carried on. A replay
diverges where its tokens are not those of the answer that it interrupted. Teacher forcing by
transformers in fp32 says how far below the likeliest any drawn token lies, in standard deviations
of its row's logits; transformers' own bf16 answers are the yardstick.
"""

import argparse
import random
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer

from ipc.vocabulary import DType
from tests.end_to_end.reference import NUM_OUTPUT, PROMPTS, Reference
from tests.gpu_workers.driving import Driver, greedy

BATCH = 8
Outputs = list[list[int]]


class Kind(msgspec.Struct, frozen=True):
    """Continuations of one kind: how many went another way, out of how many tokens that could."""

    name: str
    num_continuations: int
    num_diverged: int
    num_tokens: int  # up to and with the first that differs
    shortfall: float  # the worst of all

    @property
    def row(self) -> tuple[str, ...]:
        share = self.num_diverged / self.num_continuations
        per_thousand = 1000 * self.num_diverged / self.num_tokens
        return (
            self.name,
            f"{self.num_diverged} of {self.num_continuations} ({share:.0%})",
            f"{per_thousand:.1f}",
            f"{self.shortfall:.3f}",
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("models/smollm2"))
    parser.add_argument("--replays", type=int, default=3, help="of each answer")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    reference = Reference(arguments.model)
    prompts = [reference.tokenizer.encode(prompt) for prompt in PROMPTS]
    kinds = [
        *replays(arguments.model, reference, prompts, arguments.replays, arguments.seed),
        batches(arguments.model, reference, prompts),
    ]
    table = Table(title=f"bf16, {len(prompts)} prompts, {NUM_OUTPUT} greedy tokens each")
    for heading in ("", "went another way", "per 1000 tokens", "worst shortfall, deviations"):
        table.add_column(heading)
    for kind in kinds:
        table.add_row(*kind.row)
    Console().print(table)


def replays(
    model: Path, reference: Reference, prompts: Outputs, num_replays: int, seed: int
) -> list[Kind]:
    dice, driver = random.Random(seed), Driver(model, dtype=DType.BF16)
    kinds, undisturbed = [], []
    with torch.inference_mode():
        for batch in (1, BATCH):
            whole = carried_on(driver, prompts, [[] for _ in prompts], batch)
            undisturbed.append(whole)
            continued, originals = [], []
            for _ in range(num_replays):
                places = [dice.randrange(1, NUM_OUTPUT) for _ in prompts]
                before = [output[:place] for output, place in zip(whole, places, strict=True)]
                continued += carried_on(driver, prompts, before, batch)
                originals += list(zip(places, whole, strict=True))
            name = f"ours, replayed at batch {batch}"
            kinds.append(kind_of(name, reference, prompts * num_replays, originals, continued))
    alone, eight = undisturbed
    originals = [(0, output) for output in alone]
    return [*kinds, kind_of("ours, batch 8 beside 1", reference, prompts, originals, eight)]


def carried_on(driver: Driver, prompts: Outputs, before: Outputs, batch: int) -> Outputs:
    """Whole outputs: what was there before and what comes after it is prefilled again."""
    outputs: Outputs = []
    for start in range(0, len(prompts), batch):
        these = slice(start, start + batch)
        outputs += together(driver, prompts[these], before[these])
    return outputs


def together(driver: Driver, prompts: Outputs, before: Outputs) -> Outputs:
    outputs = [list(output) for output in before]
    running = {}
    for output, prompt in zip(outputs, prompts, strict=True):
        sequence = driver.add(prompt, greedy(max_tokens=NUM_OUTPUT), output=output)
        output += driver.prefill(sequence, len(prompt) + len(output)).token_ids
        running[sequence] = output
    while running:
        for sequence in [s for s, output in running.items() if len(output) >= NUM_OUTPUT]:
            driver.remove(sequence)
            del running[sequence]
        if running:
            drawn = driver.step(*((sequence, 1, True) for sequence in running))
            for sequence, row in drawn.items():
                running[sequence] += row.token_ids
    return outputs


def batches(model: Path, reference: Reference, prompts: Outputs) -> Kind:
    """transformers' greedy answers, alone and eight together (padded on the left)."""
    theirs = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()
    pad = AutoTokenizer.from_pretrained(model).pad_token_id or 0

    def answers(batch: int) -> Outputs:
        outputs: Outputs = []
        for start in range(0, len(prompts), batch):
            rows = prompts[start : start + batch]
            width = max(map(len, rows))
            ids = torch.tensor([[pad] * (width - len(row)) + row for row in rows])
            mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
            with torch.inference_mode():
                drawn = theirs.generate(
                    input_ids=ids,
                    attention_mask=mask,
                    do_sample=False,
                    min_new_tokens=NUM_OUTPUT,
                    max_new_tokens=NUM_OUTPUT,
                    pad_token_id=pad,
                    eos_token_id=None,
                )
            outputs += drawn[:, width:].tolist()
        return outputs

    alone, eight = answers(1), answers(BATCH)
    originals = [(0, output) for output in alone]
    return kind_of("transformers, batch 8 beside 1", reference, prompts, originals, eight)


def kind_of(
    name: str,
    reference: Reference,
    prompts: Outputs,
    originals: Sequence[tuple[int, list[int]]],
    continued: Outputs,
) -> Kind:
    num_diverged = num_tokens = 0
    for (place, original), output in zip(originals, continued, strict=True):
        pairs = list(zip(original, output, strict=True))[place:]
        first = next((i for i, (one, other) in enumerate(pairs) if one != other), None)
        num_diverged += first is not None
        num_tokens += len(pairs) if first is None else first + 1
    worst = max(
        shortfall
        for start in range(0, len(prompts), BATCH)
        for shortfall in reference.shortfalls(
            prompts[start : start + BATCH], continued[start : start + BATCH]
        )
    )
    return Kind(name, len(continued), num_diverged, num_tokens, worst)


if __name__ == "__main__":
    main()
