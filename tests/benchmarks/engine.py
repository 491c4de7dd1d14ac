"""`make bench-engine`: what this machine's engine does, and transformers in the same run.

Every part runs in a process of its own, one after the other: the engine and transformers pinned
to one core with one thread each, as a worker is; the service as a user would start it. Compare
ratios within a run: machines differ, and shared ones are noisy.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
from rich.console import Console
from rich.table import Table

from tests.benchmarks import latency, token_path
from tests.end_to_end.service import Service, serving

PREFILL_TOKENS = (128, 512, 2048)
BATCHES = (1, 8, 32)
CONTEXT = 400
REPEATS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("models/smollm2"))
    parser.add_argument("--part", choices=PARTS, help="one part, its figures as JSON")
    parser.add_argument("--peer", metavar="URL", help="another OpenAI-compatible server, idle")
    parser.add_argument("--no-token-path", action="store_true", help="leave that part out")
    arguments = parser.parse_args()
    if arguments.part:
        figures = PARTS[arguments.part](arguments.model)
        sys.stdout.write(orjson.dumps(figures).decode() + "\n")
        return
    console = Console()
    ours, theirs = (part(name, arguments.model) for name in ("engine", "transformers"))
    console.print(compared(ours, theirs))
    console.print(pulled(part("pull", arguments.model)))
    console.print(f"start to healthy, model on disk: {start_s(arguments.model):.1f} s")
    console.print(idle(arguments.model, arguments.peer))
    if not arguments.no_token_path:
        token_path.show([token_path.measure(rate) for rate in token_path.RATES], console)


def part(name: str, model: Path) -> dict[str, Any]:
    """Run one part on the last core and read its figures."""
    core = str(sorted(os.sched_getaffinity(0))[-1])
    command = ["taskset", "-c", core, sys.executable, "-m", "tests.benchmarks.engine"]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
        "TRANSFORMERS_VERBOSITY": "error",
    }
    output = subprocess.run(
        [*command, "--part", name, "--model", str(model)],
        check=True,
        stdout=subprocess.PIPE,
        env=environment,
    ).stdout
    figures: dict[str, Any] = orjson.loads(output.splitlines()[-1])
    return figures


# ---- parts: each runs in a process of its own ------------------------------------------------


def engine(model: Path) -> dict[str, Any]:
    """Our step times in ms, and the floor that reading memory sets to a decode step."""
    import torch

    from gpu_workers.cpu_exchange import CpuExchange
    from gpu_workers.engine import EngineSpec, build_executor, pool_layout
    from gpu_workers.models.config import read_config
    from gpu_workers.profiling.bench import StepBench
    from gpu_workers.profiling.grid import StepShape
    from gpu_workers.profiling.stopwatch import Stopwatch
    from ipc.vocabulary import DType

    torch.set_num_threads(1)
    config = read_config(model)
    layout = pool_layout(config, dtype=DType.BF16, block_size=32, kv_bytes=1 << 30)
    spec = EngineSpec(model_dir=str(model), dtype=DType.BF16, max_context_tokens=2048)
    exchange = CpuExchange(layout, "bench")
    exchange.pool.fill_(0.5)
    executor = build_executor(config, spec, exchange)
    bench = StepBench(executor, Stopwatch())

    def median_ms(step: StepShape) -> float:
        bench.step_ms(step)
        return statistics.median(bench.step_ms(step) for _ in range(2 * REPEATS))

    read_gb_s = _read_bandwidth(torch)
    weights = sum(f.stat().st_size for f in model.glob("*.safetensors"))
    with torch.inference_mode():
        return {
            "kernels": executor.kernels_name,
            "prefill": [median_ms(StepShape(1, tokens)) for tokens in PREFILL_TOKENS],
            "decode": [median_ms(StepShape(batch=batch, context=CONTEXT)) for batch in BATCHES],
            "floor": [
                1e-6 * (weights + batch * CONTEXT * config.kv_bytes_per_token(DType.BF16))
                / read_gb_s
                for batch in BATCHES
            ],
            "read_gb_s": read_gb_s,
        }  # fmt: skip


def transformers(model: Path) -> dict[str, Any]:
    """The same steps by transformers' generate, in ms."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()

    def generate_ms(batch: int, tokens: int, num_new: int) -> float:
        ids = torch.randint(0, network.config.vocab_size, (batch, tokens))
        how = {"max_new_tokens": num_new, "min_new_tokens": num_new, "do_sample": False}
        started_s = time.perf_counter()
        network.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **how)
        return 1000 * (time.perf_counter() - started_s)

    def step_ms(batch: int) -> float:
        num_steps = 8
        one, many = (generate_ms(batch, CONTEXT, n) for n in (1, 1 + num_steps))
        return (many - one) / num_steps

    def median(measure: Callable[[], float], repeats: int) -> float:
        measure()
        return statistics.median(measure() for _ in range(repeats))

    with torch.inference_mode():
        return {
            "prefill": [
                median(lambda t=t: generate_ms(1, t, 1), 3)  # type: ignore[misc]
                for t in PREFILL_TOKENS
            ],
            "decode": [median(lambda b=b: step_ms(b), 3) for b in BATCHES],  # type: ignore[misc]
        }


def pull(model: Path) -> dict[str, Any]:
    """A 512-token prompt from one pool to another, and a plain copy of as many bytes."""
    import torch

    from gpu_workers.cpu_exchange import CpuExchange
    from gpu_workers.engine import pool_layout
    from gpu_workers.models.config import read_config
    from gpu_workers.step_plan import Pull
    from ipc.vocabulary import DType, KVHandle, WorkerName

    torch.set_num_threads(1)
    layout = pool_layout(read_config(model), dtype=DType.BF16, block_size=32, kv_bytes=1 << 29)
    source, target = CpuExchange(layout, "source"), CpuExchange(layout, "target")
    source.pool.fill_(1.0)
    target.pool.fill_(0.0)
    target.map_peer(WorkerName("source"), 1, layout, os.dup(source.descriptor))
    num_blocks = layout.blocks_for(512)
    from_blocks = tuple(range(3, 3 + 2 * num_blocks, 2))
    into = tuple(range(1, 1 + 2 * num_blocks, 2))
    handle = KVHandle("source", 1, 1, from_blocks, 512)
    num_bytes = num_blocks * layout.block_bytes
    flat = [torch.ones(num_bytes, dtype=torch.uint8) for _ in range(8)]
    pulls, copies = [], []
    for i in range(40):
        started_s = time.perf_counter()
        target.begin(Pull(handle, into))
        pulls.append(time.perf_counter() - started_s)
        started_s = time.perf_counter()
        flat[2 * i % 8].copy_(flat[(2 * i + 1) % 8])
        copies.append(time.perf_counter() - started_s)
    return {
        "bytes": num_bytes,
        "pull_ms": 1000 * statistics.median(pulls[5:]),
        "copy_ms": 1000 * statistics.median(copies[5:]),
    }


PARTS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "engine": engine,
    "transformers": transformers,
    "pull": pull,
}


def _read_bandwidth(torch: Any) -> float:
    """GB/s of one core reading 1 GiB: the best of several sums."""
    data = torch.ones(1 << 28, dtype=torch.int32)
    best_s = float("inf")
    for _ in range(5):
        started_s = time.perf_counter()
        data.sum(dtype=torch.int32)
        best_s = min(best_s, time.perf_counter() - started_s)
    return float(data.nbytes / best_s / 1e9)


# ---- the service as a user starts it --------------------------------------------------------


def start_s(model: Path) -> float:
    """From the command to a healthy service."""
    started_s = time.monotonic()
    with serving(model):
        return time.monotonic() - started_s


def idle(model: Path, peer: str | None) -> Table:
    """Latencies of an idle service over HTTP, beside another server's that runs already."""
    table = Table(title="over HTTP, 1 prefill + 1 decode, idle")
    for column in ("", "ours ms", "peer ms", "ratio")[: 4 if peer else 2]:
        table.add_column(column, justify="right" if column else "left")
    with serving(model) as service:
        ours = latency.measure(service.url)
        control_ms = _control_ms(service)
    theirs = latency.measure(peer).named if peer else {}
    for name, ms in ours.named.items():
        beside = (f"{theirs[name]:.1f}", f"{ms / theirs[name]:.2f}") if peer else ()
        table.add_row(name, f"{ms:.1f}", *beside)
    table.add_row("the leader's own cost per step, batch 32", f"{control_ms:.2f}")
    return table


def _control_ms(service: Service) -> float:
    """What the decode leader spends on plans, books and messages, per step."""
    before = service.counts()["decode-0"]
    latency.tpot_ms(service.url, "smollm2", 32)
    after = service.counts()["decode-0"]
    steps, control_s = (after[count] - before[count] for count in ("num_steps", "control_s"))
    return 1000 * control_s / steps


# ---- tables ---------------------------------------------------------------------------------


def compared(ours: dict[str, Any], theirs: dict[str, Any]) -> Table:
    table = Table(title=f"one core, bf16, {ours['kernels']} kernels")
    for column in ("step", "ours ms", "transformers ms", "times faster", "floor ms", "over floor"):
        table.add_column(column, justify="left" if column == "step" else "right")
    for tokens, a, b in zip(PREFILL_TOKENS, ours["prefill"], theirs["prefill"], strict=True):
        table.add_row(f"prefill {tokens} tokens", f"{a:.1f}", f"{b:.1f}", f"{b / a:.1f}", "", "")
    rows = zip(BATCHES, ours["decode"], theirs["decode"], ours["floor"], strict=True)
    for batch, a, b, floor in rows:
        name = f"decode batch {batch}, {CONTEXT}-token contexts"
        table.add_row(
            name, f"{a:.1f}", f"{b:.1f}", f"{b / a:.1f}", f"{floor:.1f}", f"{a / floor:.2f}"
        )
    table.caption = f"floor: weights and KV read once at {ours['read_gb_s']:.1f} GB/s"
    return table


def pulled(figures: dict[str, Any]) -> str:
    gb = figures["bytes"] / 1e9
    pull_rate, copy_rate = (gb / figures[k] * 1000 for k in ("pull_ms", "copy_ms"))
    return (
        f"KV pull of a 512-token prompt ({figures['bytes'] / 2**20:.1f} MiB): "
        f"{figures['pull_ms']:.2f} ms, {pull_rate:.1f} GB/s; "
        f"plain copy {copy_rate:.1f} GB/s; ratio {pull_rate / copy_rate:.2f}"
    )


if __name__ == "__main__":
    main()
