"""Devices by name: what they are on a CPU, and that no two daemons have the same."""

import multiprocessing
import os
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from daemon import devices
from daemon.config import DaemonConfig, read_config
from daemon.devices import Devices
from daemon.errors import ConfigError, DeviceTaken
from daemon.feasibility import check_placement
from daemon.model_sizes import read_outline
from daemon.placement import counted_out
from ipc.vocabulary import DeviceKind
from tests.gpu_workers.checkpoints import llama_gqa

CORES = sorted(os.sched_getaffinity(0))
FIRST, LAST = CORES[0], CORES[-1]
GPU = "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"


def cores_of(*words: str) -> tuple[devices.Cores, ...]:
    return devices.read_devices(words, DeviceKind.CPU).cores


def test_a_device_is_a_core_a_range_or_several_joined() -> None:
    assert cores_of(str(FIRST)) == ((FIRST,),)
    if len(CORES) > 1:
        assert cores_of(f"{FIRST}+{LAST}") == ((FIRST, LAST),)
        assert cores_of(str(LAST), str(FIRST)) == ((LAST,), (FIRST,))


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["x"], "'x' is no device: a core such as 3"),
        ([""], "'' is no device"),
        (["3-1"], "3-1 is no range of cores"),
        (["0-99999"], "no range of cores"),
        (["-1"], "'-1' is no device"),
        ([f"{FIRST}+{FIRST}"], "a core is in it twice"),
        ([str(FIRST)] * 2, f"share core {FIRST}"),  # one object twice, as of short words
        (["4095"], "there is no core 4095 for this process"),
        (["GPU-0a1b2c3d-0000-0000-0000-000000000000"], "is a GPU, and device = cpu takes cores"),
    ],
)
def test_what_is_no_device_here_is_refused(words: list[str], why: str) -> None:
    with pytest.raises(ConfigError, match=f"devices: .*{why}" if "+" not in why else why):
        read_config(None, {"devices": words, "device": "cpu"})


def test_a_placement_with_more_devices_than_are_named_is_refused(tmp_path: Path) -> None:
    config = DaemonConfig(
        model=str(llama_gqa(tmp_path / "m")), devices=(str(FIRST),), device=DeviceKind.CPU
    )
    with pytest.raises(ConfigError, match="1 are named, and the placement needs number 1"):
        check_placement(config, counted_out(config), read_outline(config))


def test_a_device_of_another_daemon_is_refused_by_its_process_and_free_after_it_C11() -> None:
    """Held by the kernel: it is free again however the other one ends."""
    ours, theirs = multiprocessing.Pipe()
    holder = multiprocessing.get_context("spawn").Process(target=hold, args=(theirs,))
    holder.start()
    ours.recv()
    whose = f"core 4000 is used by .* process id {holder.pid}"
    with pytest.raises(DeviceTaken, match=whose) as refused, held_cores(4001, 4000):
        pass
    assert refused.value.exit_code == 75
    gpu = f"GPU {GPU} is used by .* process id {holder.pid}"
    with pytest.raises(DeviceTaken, match=gpu), devices.held(Devices(gpus=("GPU-0", GPU))):
        pass
    holder.kill()
    holder.join()
    holder.close()
    with held_cores(4000, 4001):
        pass


def held_cores(*cores: int) -> AbstractContextManager[None]:
    return devices.held(Devices(cores=tuple((core,) for core in cores)))


def hold(pipe: multiprocessing.connection.Connection) -> None:
    with held_cores(4000), devices.held(Devices(gpus=(GPU,))):
        pipe.send("held")
        pipe.recv()


def test_nothing_is_held_where_no_devices_are_named() -> None:
    nothing = devices.read_devices((), DeviceKind.CUDA)
    with devices.held(nothing), devices.held(nothing):
        pass
