"""`python -P -m gpu_workers check-gpu-exporter`: the other process of pulls, which starts it."""

import argparse
from collections.abc import Sequence

from gpu_workers.check_gpu import exporter
from gpu_workers.check_gpu.stages import backend_of


def main(argv: Sequence[str]) -> int:
    """The device is said by who pulls; the rest is between it and `exporter`."""
    parser = argparse.ArgumentParser(prog="gpu_workers check-gpu-exporter")
    parser.add_argument("--device", default="cpu")
    arguments, rest = parser.parse_known_args(argv)
    return exporter.run(backend_of(arguments.device), rest)
