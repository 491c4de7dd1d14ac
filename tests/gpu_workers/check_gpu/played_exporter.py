"""The exporter's process, on a played GPU."""

import sys

from gpu_workers.check_gpu import exporter
from tests.gpu_workers.check_gpu.played_gpu import played_gpu

if __name__ == "__main__":
    sys.exit(exporter.run(played_gpu(), sys.argv[1:]))
