"""The stages of a check, what they find out first, and how one is run in this process."""

import gc
import time
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from gpu_workers.check_gpu.attention import check_attention
from gpu_workers.check_gpu.backend import Backend, CpuBackend
from gpu_workers.check_gpu.bandwidth import check_bandwidth
from gpu_workers.check_gpu.graphs import check_graphs
from gpu_workers.check_gpu.host_costs import measure_host
from gpu_workers.check_gpu.layouts import compare_layouts
from gpu_workers.check_gpu.model import check_model
from gpu_workers.check_gpu.modules import build_modules
from gpu_workers.check_gpu.outcome import CheckFailed, Note, Outcome, Skipped, Verdict
from gpu_workers.check_gpu.probe import probe
from gpu_workers.check_gpu.pulls import check_death, check_pulls
from gpu_workers.check_gpu.service import check_parallel, check_service
from gpu_workers.check_gpu.steps import measure_steps

CPU_PATIENCE = 4.0  # on a CPU, whose cores others use too, everything may take so much longer


Open = Callable[[], Backend]
"""Gives the device, which is opened the first time."""


class Stage(NamedTuple):
    """One part of the check: returns what it found in one sentence, and notes its figures.

    `limit_s` is what it may take on a GPU, where the modules were compiled ahead or not.
    """

    name: str
    limit_s: float
    run: Callable[[Open, Note], str]

    def limit_on(self, device: str) -> float:
        return self.limit_s * (CPU_PATIENCE if device == "cpu" else 1.0)


def _on(check: Callable[[Backend, Note], str]) -> Callable[[Open, Note], str]:
    return lambda open_backend, note: check(open_backend(), note)


STAGES = (
    Stage("probe", 60, probe),
    Stage("modules", 150, _on(build_modules)),
    Stage("attention", 120, _on(check_attention)),
    Stage("graphs", 60, _on(check_graphs)),
    Stage("pulls", 60, _on(check_pulls)),
    Stage("steps", 100, _on(measure_steps)),
    Stage("service", 110, _on(check_service)),
    Stage("bandwidth", 60, _on(check_bandwidth)),
    Stage("model", 60, _on(check_model)),
    Stage("host", 40, _on(measure_host)),
    Stage("layouts", 40, _on(compare_layouts)),
    Stage("parallel", 110, _on(check_parallel)),
    Stage("death", 60, _on(check_death)),
)
"""In this order, since time may be short: whether it computes rightly, the figures that people ask
for, whether it serves; then what explains figures, and what is rarer. The last one may leave the
device unusable to its process."""
BY_NAME = {stage.name: stage for stage in STAGES}


def backend_of(device: str) -> Backend:
    """`cpu`, or `cuda:N`. Raises ModelError: there is no such device."""
    if device == "cpu":
        return CpuBackend()
    from gpu_workers.check_gpu.cuda_backend import cuda_backend

    return cuda_backend(int(device.partition(":")[2] or 0))


def run_here(stage: Stage, open_backend: Open, note: Note) -> Outcome:
    """A stage in this process. Whatever goes wrong in it is its outcome.

    Args:
        note: hears of figures as they come; the outcome has them, too.
    """
    began_s = time.monotonic()
    figures: dict[str, Any] = {}
    log = ""

    def keep(name: str, value: Any) -> None:
        figures[name] = value
        note(name, value)

    try:
        verdict, detail = Verdict.PASS, stage.run(open_backend, keep)
    except Skipped as reason:
        verdict, detail = Verdict.SKIP, str(reason)
    except CheckFailed as failed:
        verdict, detail = Verdict.FAIL, str(failed)
    except Exception as error:
        verdict, detail = Verdict.FAIL, f"{type(error).__name__}: {error}"
        log = traceback.format_exc()
    _give_back()
    return Outcome(stage.name, verdict, time.monotonic() - began_s, detail, figures, log)


def _give_back() -> None:
    """The device's memory that nobody here uses any more: processes of later stages want it."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
