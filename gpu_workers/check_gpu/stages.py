"""The stages of a check, in their order, and how each is run: by itself, within a time.

Every stage has a process of its own. So one that hangs is ended, and a device that one stage has
left unusable is a fresh one to the next.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
import orjson

from gpu_workers.check_gpu.attention import check_attention
from gpu_workers.check_gpu.backend import Backend, CpuBackend
from gpu_workers.check_gpu.bandwidth import check_bandwidth
from gpu_workers.check_gpu.model import check_model
from gpu_workers.check_gpu.outcome import CheckFailed, Found, Outcome, Skipped, Verdict
from gpu_workers.check_gpu.probe import probe
from gpu_workers.check_gpu.pulls import check_death, check_pulls
from gpu_workers.check_gpu.service import check_service
from gpu_workers.check_gpu.steps import check_graphs, measure_steps


class Stage(NamedTuple):
    """One part of the check."""

    name: str
    limit_s: float
    run: Callable[[Backend], Found]


STAGES = (
    Stage("probe", 60, probe),
    Stage("attention", 120, check_attention),
    Stage("pulls", 240, check_pulls),
    Stage("death", 60, check_death),
    Stage("bandwidth", 120, check_bandwidth),
    Stage("graphs", 120, check_graphs),
    Stage("model", 120, check_model),
    Stage("service", 240, check_service),
    Stage("steps", 240, measure_steps),
)
BY_NAME = {stage.name: stage for stage in STAGES}


def backend_of(device: str) -> Backend:
    """`cpu`, or `cuda:N`. Raises ModelError: there is no such device."""
    if device == "cpu":
        return CpuBackend()
    from gpu_workers.check_gpu.cuda_backend import cuda_backend

    return cuda_backend(int(device.partition(":")[2] or 0))


def run_here(stage: Stage, backend: Callable[[], Backend]) -> Outcome:
    """A stage in this process. Whatever goes wrong in it is its outcome."""
    began_s = time.monotonic()
    figures: dict[str, Any] = {}
    try:
        found = stage.run(backend())
        verdict, detail, figures = Verdict.PASS, found.detail, dict(found.figures)
    except Skipped as reason:
        verdict, detail = Verdict.SKIP, str(reason)
    except CheckFailed as failed:
        verdict, detail = Verdict.FAIL, str(failed)
    except Exception as error:
        verdict, detail = Verdict.FAIL, f"{type(error).__name__}: {error}"
    return Outcome(stage.name, verdict, time.monotonic() - began_s, detail, figures)


def run_apart(command: Sequence[str], stage: Stage) -> Outcome:
    """A stage in a process of its own, which prints its outcome; ended when its time is over."""
    began_s = time.monotonic()
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, process_group=0
    )
    try:
        printed, _ = process.communicate(timeout=stage.limit_s)
        return msgspec.convert(orjson.loads(printed.splitlines()[-1]), Outcome)
    except subprocess.TimeoutExpired:
        detail = f"not done after {stage.limit_s:g} s"
    except (IndexError, ValueError):
        detail = f"its process ended with {process.returncode} and said nothing"
    finally:
        _end(process)
    return Outcome(stage.name, Verdict.FAIL, time.monotonic() - began_s, detail)


def stage_command(stage: Stage, device: str) -> list[str]:
    """Runs one stage and prints its outcome."""
    command = [sys.executable, "-P", "-m", "gpu_workers", "check-gpu"]
    return [*command, "--device", device, "--only-here", stage.name]


def _end(process: subprocess.Popen[bytes]) -> None:
    """With all that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert process.stdout is not None
    process.stdout.close()
