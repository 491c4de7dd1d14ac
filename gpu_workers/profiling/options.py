"""The options of `distserve profile`."""

import argparse
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from gpu_workers.arguments import Parser, amount, count, one_of
from ipc.messages import LoadFormat
from ipc.vocabulary import DType

MOST_THREADS = 1024  # of one worker; far beyond that the threads' own library ends the process

DESCRIPTION = """\
Measure how long an instance's steps take on this machine: prefill by prompt length
and by number of prompts, decode by batch and context, chunks of prompts beside
decodes, and pulls of keys and values from another instance's pools. The table is
what distserve simulate and plan predict with. Finds L_m too, the shortest prompt
that saturates the device: prompts below it are worth packing together.

With --tp and --pp it is an instance of that shape, a process for each worker: steps
are whole steps, through all stages one after the other, and pulls are those of all
workers from a second instance of the same shape.

On GPUs an instance takes as many as it has workers, one after the other. Decode steps
run as captured graphs and are timed at the distance at which they follow each other,
prompts run eagerly; pulls come by CUDA IPC from other processes.

Everything is measured in rounds over the whole grid, so that a noisy minute does
not spoil a part of it; figures are medians over the rounds."""

EPILOG = """\
examples:
  distserve profile --model models/smollm2 --quick
  distserve profile --model models/smollm2 --out profiles/smollm2-cpu.json
  distserve profile --model DIR --load-format dummy   # config.json is enough
  distserve profile --model models/smollm2 --tp 3 --pp 2 --out tp3pp2.json
  distserve profile --model DIR --device cuda:4 --tp 2 --out tp2.json   # GPUs 4 and 5

Run it on a quiet machine, on the cores a worker will have: taskset -c 1 distserve ..."""


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """What depends on the device is None where nothing was said."""
    parser = Parser(
        prog="distserve profile",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=DESCRIPTION,
        epilog=EPILOG,
    )
    _add_worker_options(parser.add_argument)
    _add_device_options(parser.add_argument)
    _add_effort_options(parser.add_argument)
    return parser.parse_args(argv)


def _add_worker_options(add: Callable[..., argparse.Action]) -> None:
    """What a worker of the daemon would have."""
    add("--model", required=True, metavar="DIR", help="a Hugging Face model directory")
    add(
        "--dtype",
        type=one_of(DType),
        default=DType.BF16,
        metavar="TYPE",
        help=f"{', '.join(DType)}; default: bfloat16",
    )
    add(
        "--load-format",
        type=one_of(LoadFormat),
        default=LoadFormat.SAFETENSORS,
        metavar="FORMAT",
        help="safetensors, or dummy: random weights, the same times; default: safetensors",
    )
    add("--block-size", type=count, default=32, help="tokens per KV block; default: 32")
    add(
        "--kv-gib",
        type=amount,
        help="memory for each KV pool, GiB; default: 1, on GPUs what --gpu-memory-utilization "
        "leaves",
    )
    add("--threads", type=_threads, default=1, help="compute threads of each worker; default: 1")
    add("--tp", type=count, default=1, help="workers that share every matrix; default: 1")
    add("--pp", type=count, default=1, help="stages that share the layers; default: 1")


def _add_device_options(add: Callable[..., argparse.Action]) -> None:
    add(
        "--device",
        type=_device,
        default="auto",
        metavar="auto|cpu|cuda[:N]",
        help="N is the first worker's GPU; default: auto, a GPU where there is one",
    )
    add(
        "--pull-from",
        type=_index,
        metavar="N",
        help="first GPU of the instance that is pulled from; default: the one after ours, or the "
        "same GPUs where there are no more",
    )
    add(
        "--gpu-memory-utilization",
        type=_share,
        default=0.85,
        metavar="X",
        help="share of a GPU's memory to take, pool included; default: 0.85, which leaves room "
        "for the pool that is pulled from",
    )


def _add_effort_options(add: Callable[..., argparse.Action]) -> None:
    add("--out", type=Path, metavar="FILE", help="write the table as JSON")
    add("--quick", action="store_true", help="contexts to 512, batches to 8, a few seconds")
    add(
        "--seconds",
        type=amount,
        metavar="S",
        help="time for measuring, beyond which no round is begun; default: 75, on GPUs 60, "
        "with --quick 9",
    )
    add(
        "--max-context",
        type=count,
        help="longest context measured; default: 4096, on GPUs 8192, if the model takes as much",
    )
    add("--max-batch", type=count, help="largest decode batch measured; default: 32, on GPUs 256")


def _threads(text: str) -> int:
    number = count(text)
    if number > MOST_THREADS:
        raise argparse.ArgumentTypeError(f"{number} is more than {MOST_THREADS}")
    return number


def _index(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a GPU's number")
    return int(text)


def _share(text: str) -> float:
    if (number := amount(text)) > 1:
        raise argparse.ArgumentTypeError(f"{text} is more than 1")
    return number


def _device(text: str) -> str:
    if re.fullmatch(r"auto|cpu|cuda(:[0-9]+)?", text) is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not auto, cpu, cuda or cuda:N")
    return text
