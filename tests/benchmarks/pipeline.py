"""`make bench-pipeline`: what several workers on a core each gain over one, and what they lose.

Pipeline: pp 2 on two cores against pp 1 on one, the same batch in each micro-batch, without client
and daemon. In the same run each stage is timed with one step under way at a time; the slowest one
(the head counts) bounds the throughput that this cut allows. Stages that compute together are
slower, since they share the machine's memory: that bound is beside it. Tensor parallel: whole
steps of tp 2 beside tp 1 of the same model, and how much of them is spent in sums: through shared
memory, or over gloo where DISTSERVE_KERNELS=torch leaves nothing else.
"""

import argparse
import os
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import orjson
from rich.console import Console
from rich.table import Table

from gpu_workers.profiling.subject import Subject
from ipc.messages import LoadFormat
from ipc.vocabulary import DType, Parallelism
from tests.benchmarks.scripted_load import Instance, Span, instance
from tests.benchmarks.watched_rank import SUM_ROWS, Step

BATCHES = (1, 8, 32)
CONTEXT = 64
NUM_TOKENS = {1: 90, 8: 60, 32: 40}
PROMPTS = (512, 64, 200, 32, 700, 128, 350, 96, 450, 16, 256, 600)
GOALS = {"decode": 0.85, "prefill": 0.8}


class Load(msgspec.Struct, frozen=True):
    """`batch` decodes in each micro-batch; None is prefill of PROMPTS."""

    batch: int | None

    def run(self, on: Instance, pp: int, in_flight: int) -> Span:
        if self.batch is None:
            return on.prefill(PROMPTS, in_flight=in_flight)
        num_tokens = NUM_TOKENS[self.batch]
        return on.decode(self.batch * pp, CONTEXT, num_tokens, in_flight=in_flight)

    def __str__(self) -> str:
        return "prefill, mixed lengths" if self.batch is None else f"decode, batch {self.batch}"


class Taken(msgspec.Struct, frozen=True):
    """What the ranks did in a span: each one's steps, the last one draws."""

    steps: list[list[Step]]

    @property
    def num_tokens(self) -> int:
        return sum(step.num_tokens for step in self.steps[-1][1:])

    @property
    def elapsed_s(self) -> float:
        """From the end of the first step to the end of the last: the pipeline is full."""
        return self.steps[-1][-1].ended_s - self.steps[-1][0].ended_s

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.elapsed_s

    @property
    def busy_s(self) -> list[float]:
        """Per token, of each rank: the sum, so that mixed steps count for what they are."""
        return [sum(step.busy_s for step in steps[1:]) / self.num_tokens for steps in self.steps]

    @property
    def delayed(self) -> float:
        """The share of the time in which ranks could have computed but had not their core."""
        delayed_s = sum(step.delayed_s for steps in self.steps for step in steps[1:])
        return delayed_s / (self.elapsed_s * len(self.steps))

    def idle(self) -> list[float]:
        """The share of the time in which each rank computed nothing."""
        return [1 - busy_s * self.tokens_per_s for busy_s in self.busy_s]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="models/smollm2")
    parser.add_argument("--part", choices=("pipeline", "tensor"), help="one of the two")
    arguments = parser.parse_args()
    console, load = Console(), os.getloadavg()[0]
    if arguments.part != "tensor":
        console.print(pipeline(arguments.model))
    if arguments.part != "pipeline":
        for table in tensor_parallel(arguments.model):
            console.print(table)
    console.print(f"load of the machine before: {load:.1f}; {os.cpu_count()} cores")


def subject(model: str, tp: int, pp: int, load_format: LoadFormat) -> Subject:
    return Subject(
        model_dir=model,
        dtype=DType.BF16,
        load_format=load_format,
        max_context_tokens=1024,
        block_size=32,
        kv_bytes=1 << 29,
        num_threads=1,
        parallelism=Parallelism(tp, pp),
    )


LOADS = (*map(Load, BATCHES), Load(None))


def pipeline(model: str) -> Table:
    """Alone: one step under way at a time; then two, which is what counts."""
    how = LoadFormat.SAFETENSORS
    (single,) = measure(subject(model, 1, 1, how), [1])
    alone, full = measure(subject(model, 1, 2, how), [1, 2])
    table = Table("", *map(str, LOADS), title="a pipeline of two stages, on a core each")
    columns = [
        _column(load, *taken) for load, *taken in zip(LOADS, single, alone, full, strict=True)
    ]
    for name in columns[0]:
        table.add_row(name, *(column[name] for column in columns))
    return table


def _column(load: Load, one: Taken, alone: Taken, full: Taken) -> dict[str, str]:
    """`full` against the bound by the slowest stage of `alone`, and against one worker."""
    bound = 1 / max(alone.busy_s)
    goal = GOALS["prefill" if load.batch is None else "decode"]
    return {
        "pp 1, tokens/s": f"{one.tokens_per_s:,.0f}",
        "stages alone, us per token": _stages(alone, 1e6),
        "stages together, us per token": _stages(full, 1e6),
        "bound by the slowest stage, tokens/s": f"{bound:,.0f}",
        "pp 2, tokens/s": f"{full.tokens_per_s:,.0f}",
        "share of the bound (goal)": f"{full.tokens_per_s / bound:.2f} ({goal})",
        "share of the bound by the stages together": f"{full.tokens_per_s * max(full.busy_s):.2f}",
        "times pp 1 (bound)": f"{full.tokens_per_s / one.tokens_per_s:.2f} "
        f"({bound / one.tokens_per_s:.2f})",
        "bubbles of each stage": " / ".join(f"{idle:.0%}" for idle in full.idle()),
        "waiting for the core (own threads, others)": f"{full.delayed:.0%}",
        "twice one step at a time, tokens/s": f"{2 * alone.tokens_per_s:,.0f}",
    }


def _stages(taken: Taken, scale: float) -> str:
    return " / ".join(f"{scale * busy_s:,.0f}" for busy_s in taken.busy_s)


def tensor_parallel(model: str) -> list[Table]:
    steps, sums = Table("ms per step", "tp 1", "tp 2", "ratio", "in sums"), Table("rows", "us")
    with divisible(model) as other:
        (one,) = measure(subject(other, 1, 1, LoadFormat.DUMMY), [1])
        with instance(subject(other, 2, 1, LoadFormat.DUMMY)) as two:
            spans = [load.run(two, 1, 1) for load in LOADS]
    for load, before, span in zip(LOADS, one, spans, strict=True):
        after = taken(two, span, draws=0)
        sums_s = [step.summed_s for step in after.steps[0]]
        times = [typical_ms([s.busy_s for s in t.steps[0]]) for t in (before, after)]
        in_sums = f"{typical_ms(sums_s):.1f}"
        steps.add_row(
            str(load), *(f"{t:.1f}" for t in times), f"{times[1] / times[0]:.2f}", in_sums
        )
    for rows, us in zip(SUM_ROWS, two.sums_us, strict=True):
        sums.add_row(str(rows), f"{us:.0f}")
    sums.title = "one bare sum"
    return [steps, sums]


@contextmanager
def divisible(model: str) -> Iterator[str]:
    """The model's `config.json` with heads that two workers can share: 8 over 4 of its width."""
    config = orjson.loads((Path(model) / "config.json").read_bytes())
    width = config["hidden_size"] // config["num_attention_heads"]
    config |= {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": width}
    with tempfile.TemporaryDirectory(prefix="ds-") as directory:
        (Path(directory) / "config.json").write_bytes(orjson.dumps(config))
        yield directory


def measure(what: Subject, in_flight: Sequence[int]) -> list[list[Taken]]:
    """All loads with so many steps under way."""
    pp = what.parallelism.pp
    with instance(what) as one:
        spans = [[load.run(one, pp, number) for load in LOADS] for number in in_flight]
    return [[taken(one, span, draws=-1) for span in row] for row in spans]


def taken(of: Instance, span: Span, *, draws: int) -> Taken:
    """The steps that the drawing rank ended within the span, and the same ones of all ranks.

    Every rank takes the same steps in the same order.
    """
    inside = [
        index
        for index, step in enumerate(of.steps[draws])
        if span.began_s <= step.began_s and step.ended_s <= span.ended_s
    ]
    return Taken([steps[inside[0] : inside[-1] + 1] for steps in of.steps])


def typical_ms(seconds: Sequence[float]) -> float:
    return 1000 * statistics.median(seconds)


if __name__ == "__main__":
    main()
