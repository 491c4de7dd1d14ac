"""Devices by name: what they are on a CPU, and that no two daemons have the same."""

import multiprocessing
import os
from pathlib import Path

import pytest

from daemon import devices
from daemon.config import DaemonConfig, read_config
from daemon.errors import ConfigError, DeviceTaken
from daemon.feasibility import check_placement
from daemon.model_sizes import read_outline
from daemon.placement import counted_out
from tests.gpu_workers.checkpoints import llama_gqa

CORES = sorted(os.sched_getaffinity(0))
FIRST, LAST = CORES[0], CORES[-1]


def test_a_device_is_a_core_a_range_or_several_joined() -> None:
    assert devices.read_devices([str(FIRST)]) == [(FIRST,)]
    if len(CORES) > 1:
        assert devices.read_devices([f"{FIRST}+{LAST}"]) == [(FIRST, LAST)]
        assert devices.read_devices([str(LAST), str(FIRST)]) == [(LAST,), (FIRST,)]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["x"], "'x' is no device: a core such as 3"),
        ([""], "'' is no device"),
        (["3-1"], "3-1 is no range of cores"),
        (["0-99999"], "no range of cores"),
        (["-1"], "'-1' is no device"),
        ([f"{FIRST}+{FIRST}"], "a core is in it twice"),
        ([str(FIRST), str(FIRST)], f"share core {FIRST}"),
        (["4095"], "there is no core 4095 for this process"),
        (["GPU-0a1b2c3d-0000-0000-0000-000000000000"], "compute on cores, not on GPUs"),
    ],
)
def test_what_is_no_device_here_is_refused(words: list[str], why: str) -> None:
    with pytest.raises(ConfigError, match=f"devices: .*{why}" if "+" not in why else why):
        read_config(None, {"devices": words})


def test_a_placement_with_more_devices_than_are_named_is_refused(tmp_path: Path) -> None:
    config = DaemonConfig(model=str(llama_gqa(tmp_path / "m")), devices=(str(FIRST),))
    with pytest.raises(ConfigError, match="1 are named, and the placement needs number 1"):
        check_placement(config, counted_out(config), read_outline(config))


def test_a_device_of_another_daemon_is_refused_by_its_process_and_free_after_it_C11() -> None:
    """Held by the kernel: it is free again however the other one ends."""
    ours, theirs = multiprocessing.Pipe()
    holder = multiprocessing.get_context("spawn").Process(target=hold, args=(theirs,))
    holder.start()
    ours.recv()
    whose = f"core 4000 is used by .* process id {holder.pid}"
    with pytest.raises(DeviceTaken, match=whose) as refused, devices.held([(4001,), (4000,)]):
        pass
    assert refused.value.exit_code == 75
    holder.kill()
    holder.join()
    holder.close()
    with devices.held([(4000,), (4001,)]):
        pass


def hold(pipe: multiprocessing.connection.Connection) -> None:
    with devices.held([(4000,)]):
        pipe.send("held")
        pipe.recv()


def test_nothing_is_held_where_no_devices_are_named() -> None:
    with devices.held(devices.read_devices(())), devices.held(devices.read_devices(())):
        pass
