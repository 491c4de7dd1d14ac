"""`python -P -m gpu_workers COMMAND`: the commands that need torch.

worker         one worker process; started by the daemon, not by people
profile        measure step times and L_m into a table (`distserve profile`)
profile-rank   one of several workers that are profiled together; started by `profile`
weight-holder  holds weights that workers of one GPU share; started by a worker
check-gpu      prove a device, stage by stage (`distserve check-gpu`)
check-gpu-exporter   the other process of its pulls; started by `check-gpu`
convert-gguf   turn a GGUF file into a Hugging Face directory (`distserve models fetch`)
cuda-build     build FlashInfer's modules ahead of the first step (`make cuda-build`)
"""

import importlib
import sys

from ipc import journal

COMMANDS = {
    "worker": "gpu_workers.worker",
    "profile": "gpu_workers.profiling.command",
    "profile-rank": "gpu_workers.profiling.ranks",
    "check-gpu": "gpu_workers.check_gpu.command",
    "check-gpu-exporter": "gpu_workers.check_gpu.exporter_process",
    "weight-holder": "gpu_workers.weight_holder",
    "convert-gguf": "gpu_workers.gguf_convert",
    "cuda-build": "gpu_workers.cuda_build",
}


def main(argv: list[str]) -> int:
    if not argv or argv[0] not in COMMANDS:
        sys.stderr.write(__doc__ or "")
        return 64
    journal.set_up(journal.inherited_level())
    # Loaded by name: a worker must not wait for the imports that only a conversion needs.
    command = importlib.import_module(COMMANDS[argv[0]])
    return int(command.main(argv[1:]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
