"""Measure one worker's step times into a table: `distserve profile`.

The L_m found here is what `distserve serve --prefill-tokens` wants; the table is there to fit a
latency model to. Steps are ordinary step plans of random tokens, run by the executor that would
serve; every figure is the median of repeated steps.

L_m is the shortest prompt that saturates the device (arXiv 2401.09670, section 3.1): the shortest
one measured whose prefill throughput, in tokens per second, is at least `SATURATION` of the best
throughput of any single prompt. Below it prompts are worth packing together; above it a prompt is
run alone.
"""

import argparse
import platform
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import orjson
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from gpu_workers.engine import EngineSpec, PrivatePool, build_executor, pool_layout
from gpu_workers.errors import ModelError
from gpu_workers.executor import Executor
from gpu_workers.models.config import read_config
from gpu_workers.step_plan import NewBlocks, NewSequence, Row, StepPlan
from ipc.kv_layout import blocks_for
from ipc.messages import LoadFormat
from ipc.vocabulary import DType, SamplingParams

TABLE_VERSION = 1
SATURATION = 0.9  # shared CPU cores repeat a measurement to a few percent, not better
PROMPT_TOKENS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
PROMPTS_TOGETHER = (2, 4, 8)
PACKED_TOKENS = (32, 128)  # length of each prompt when several are prefilled together
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
CONTEXTS = (64, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)

GREEDY = SamplingParams(max_tokens=1 << 30, seed=0, temperature=0.0)

Report = Callable[[float, str], None]


class PrefillPoint(msgspec.Struct, frozen=True):
    """A step that prefills `num_prompts` prompts of `num_tokens` each."""

    num_prompts: int
    num_tokens: int
    ms: float

    @property
    def tokens_per_s(self) -> float:
        return 1000 * self.num_prompts * self.num_tokens / self.ms


class DecodePoint(msgspec.Struct, frozen=True):
    """A step that decodes `batch` sequences which hold `context` tokens each."""

    batch: int
    context: int
    ms: float


class ProfileTable(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured, and on what. `saturation_tokens` is L_m."""

    version: int = TABLE_VERSION
    model: str
    device: str
    kernels: str
    dtype: DType
    tp: int = 1
    pp: int = 1
    block_size: int
    num_threads: int
    saturation_tokens: int
    prefill: tuple[PrefillPoint, ...]
    decode: tuple[DecodePoint, ...]


class Effort(msgspec.Struct, frozen=True):
    """How long to look: repeats of each step, and a bound on the seconds spent on one point."""

    repeats: int
    point_s: float
    max_batch: int
    max_context: int


def measure(
    executor: Executor, effort: Effort, *, report: Report = lambda fraction, what: None
) -> ProfileTable:
    """Run the grid that fits the executor's context and pool, and find L_m.

    Args:
        executor: a fresh one; its table must be empty, its pool is overwritten.
        effort: repeats and the largest batch and context.
        report: called with the fraction done and what comes next.

    Raises:
        ModelError: the pool is too small for a single point.
    """
    bench = StepBench(executor, effort)
    prefills, decodes = _prefill_grid(bench), _decode_grid(bench)
    if not prefills or not decodes:
        raise ModelError("the KV pool or the context is too small to measure anything")
    num_points, num_done = len(prefills) + len(decodes), 0
    prefill, decode = list[PrefillPoint](), list[DecodePoint]()
    for number, tokens in prefills:
        report(num_done / num_points, f"prefill {number} x {tokens} tokens")
        prefill.append(PrefillPoint(number, tokens, bench.prefill_ms(number, tokens)))
        num_done += 1
    for number, tokens in decodes:
        report(num_done / num_points, f"decode {number} x {tokens} tokens")
        decode.append(DecodePoint(number, tokens, bench.decode_ms(number, tokens)))
        num_done += 1
    report(1.0, "done")
    config, pool = executor.model.config, executor.exchange.pool
    return ProfileTable(
        model=config.name,
        device=_device_name(),
        kernels=executor.kernels_name,
        dtype=DType(str(pool.dtype).removeprefix("torch.")),
        block_size=bench.block_size,
        num_threads=torch.get_num_threads(),
        saturation_tokens=saturation_tokens(prefill),
        prefill=tuple(prefill),
        decode=tuple(decode),
    )


def saturation_tokens(points: Sequence[PrefillPoint]) -> int:
    """L_m of single prompts: see the module's head."""
    single = sorted(
        (point for point in points if point.num_prompts == 1), key=lambda point: point.num_tokens
    )
    best = max(point.tokens_per_s for point in single)
    return next(p.num_tokens for p in single if p.tokens_per_s >= SATURATION * best)


class StepBench:
    """Times steps of an executor and leaves its table as it was."""

    def __init__(self, executor: Executor, effort: Effort) -> None:
        self.executor = executor
        self.effort = effort
        self.num_blocks, _, _, _, self.block_size, _ = executor.exchange.pool.shape
        self._random = random.Random(0)

    def fits(self, number: int, tokens: int) -> bool:
        """Whether so many sequences of that length have room."""
        longest = min(self.executor.max_context_tokens, self.effort.max_context)
        blocks = number * blocks_for(tokens, self.block_size)
        return tokens <= longest and blocks <= self.num_blocks

    def prefill_ms(self, number: int, tokens: int) -> float:
        """A step that computes whole prompts."""
        return self._median(number, tokens, num_new=tokens)

    def decode_ms(self, number: int, tokens: int) -> float:
        """A step of one new token each. What the pool holds does not matter to the time."""
        return self._median(number, tokens, num_new=1)

    def _median(self, number: int, tokens: int, *, num_new: int) -> float:
        """One run to warm up, then repeats until the point's time is spent."""
        self._once(number, tokens, num_new)
        deadline_s = time.perf_counter() + self.effort.point_s
        timings = [self._once(number, tokens, num_new)]
        while len(timings) < self.effort.repeats and time.perf_counter() < deadline_s:
            timings.append(self._once(number, tokens, num_new))
        return statistics.median(timings)

    def _once(self, number: int, tokens: int, num_new: int) -> float:
        """Milliseconds of one step; entering and leaving the table is not part of it."""
        sequences = range(number)
        self._run(self._entry(number, tokens, num_computed=tokens - num_new))
        started_s = time.perf_counter()
        self._run(StepPlan(step_id=1, rows=tuple(Row(s, num_new, True) for s in sequences)))
        elapsed_s = time.perf_counter() - started_s
        self._run(StepPlan(step_id=2, removed=tuple(sequences)))
        return 1000 * elapsed_s

    def _entry(self, number: int, tokens: int, *, num_computed: int) -> StepPlan:
        """Sequences of random tokens in scattered blocks."""
        each = blocks_for(tokens, self.block_size)
        blocks = self._random.sample(range(self.num_blocks), number * each)
        vocabulary = range(self.executor.num_token_ids)
        prompts = [tuple(self._random.choices(vocabulary, k=tokens)) for _ in range(number)]
        return StepPlan(
            step_id=0,
            added=tuple(
                NewSequence(s, (0,), prompt, (), num_computed, GREEDY)
                for s, prompt in enumerate(prompts)
            ),
            blocks=tuple(
                NewBlocks(s, tuple(blocks[s * each : (s + 1) * each])) for s in range(number)
            ),
        )

    def _run(self, plan: StepPlan) -> None:
        self.executor.collect(self.executor.launch(plan))


def _prefill_grid(bench: StepBench) -> list[tuple[int, int]]:
    grid = [(1, tokens) for tokens in PROMPT_TOKENS]
    grid += [(number, tokens) for tokens in PACKED_TOKENS for number in PROMPTS_TOGETHER]
    return [point for point in grid if bench.fits(*point)]


def _decode_grid(bench: StepBench) -> list[tuple[int, int]]:
    batches = [batch for batch in BATCHES if batch <= bench.effort.max_batch]
    grid = [(batch, context) for context in CONTEXTS for batch in batches]
    return [point for point in grid if bench.fits(*point)]


def _device_name() -> str:
    """The processor's own name, or the machine's kind where the system does not tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


# ---- the command ----------------------------------------------------------------------------


def main(argv: Sequence[str]) -> int:
    """`distserve profile`. Returns the exit code."""
    arguments = _parser().parse_args(argv)
    console = Console(stderr=True)
    torch.set_num_threads(arguments.threads)
    try:
        table = _profile(arguments, console)
    except ModelError as error:
        console.print(f"[red]error:[/red] {error}", highlight=False)
        return 1
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_bytes(orjson.dumps(msgspec.to_builtins(table)))
    _show(table, Console())
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="distserve profile",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=(
            "Measure how long one worker's steps take on this machine: prefill by prompt length\n"
            "and by number of prompts, decode by batch and context. Finds L_m, the shortest\n"
            "prompt that saturates the device: prompts below it are worth packing together."
        ),
        epilog=(
            "examples:\n"
            "  distserve profile --model models/smollm2 --quick\n"
            "  distserve profile --model models/smollm2 --out profiles/smollm2-cpu.json\n"
            "  distserve profile --model DIR --load-format dummy   # config.json is enough\n\n"
            "Run it on a quiet machine, on the cores a worker will have: taskset -c 1 distserve ..."
        ),
    )
    add = parser.add_argument
    add("--model", required=True, metavar="DIR", help="a Hugging Face model directory")
    add("--dtype", type=DType, choices=list(DType), default=DType.BF16, help="default: bfloat16")
    add(
        "--load-format",
        type=LoadFormat,
        choices=list(LoadFormat),
        default=LoadFormat.SAFETENSORS,
        help="dummy: random weights, the same times; default: safetensors",
    )
    add("--out", type=Path, metavar="FILE", help="write the table as JSON")
    add("--quick", action="store_true", help="fewer repeats, contexts to 512, batches to 8")
    add("--max-context", type=int, default=4096, help="longest context measured; default: 4096")
    add("--max-batch", type=int, default=32, help="largest decode batch measured; default: 32")
    add("--block-size", type=int, default=32, help="tokens per KV block; default: 32")
    add("--kv-gib", type=float, default=2.0, help="memory for the KV pool, GiB; default: 2")
    add("--threads", type=int, default=1, help="compute threads, as the worker has; default: 1")
    return parser


def _profile(arguments: argparse.Namespace, console: Console) -> ProfileTable:
    config = read_config(arguments.model)
    max_context = min(arguments.max_context, config.max_positions)
    spec = EngineSpec(
        model_dir=arguments.model,
        dtype=arguments.dtype,
        load_format=arguments.load_format,
        max_context_tokens=max_context,
    )
    layout = pool_layout(
        config,
        dtype=arguments.dtype,
        block_size=arguments.block_size,
        kv_bytes=int(arguments.kv_gib * 2**30),
    )
    effort = Effort(10, 5.0, arguments.max_batch, max_context)
    if arguments.quick:
        effort = Effort(3, 1.0, min(8, arguments.max_batch), min(512, max_context))
    with _progress(console) as (loading, measuring):
        executor = build_executor(
            config, spec, PrivatePool(layout), progress=lambda done: loading(done, config.name)
        )
        return measure(executor, effort, report=measuring)


@contextmanager
def _progress(console: Console) -> Iterator[tuple[Report, Report]]:
    """Two bars: loading the weights, measuring."""
    columns = (TextColumn("{task.fields[stage]}"), BarColumn(), TextColumn("{task.description}"))
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        tasks = [progress.add_task("", total=1.0, stage=s) for s in ("loading  ", "measuring")]

        def reporter(task: TaskID) -> Report:
            return lambda done, what: progress.update(task, completed=done, description=what)

        yield reporter(tasks[0]), reporter(tasks[1])


def _show(table: ProfileTable, console: Console) -> None:
    console.print(
        f"{table.model}, {table.dtype}, {table.kernels} kernels, {table.num_threads} thread(s), "
        f"{table.device}\nL_m = [bold]{table.saturation_tokens}[/bold] tokens",
        highlight=False,
    )
    prefill = Table("prompts", "tokens each", "ms", "tokens/s", title="prefill")
    for point in table.prefill:
        rate = f"{point.tokens_per_s:,.0f}"
        prefill.add_row(str(point.num_prompts), str(point.num_tokens), f"{point.ms:.1f}", rate)
    decode = Table("batch", "context", "ms per step", title="decode")
    for step in table.decode:
        decode.add_row(str(step.batch), str(step.context), f"{step.ms:.1f}")
    console.print(prefill, decode)
