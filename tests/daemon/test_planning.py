"""`--placement auto`: the real planner as a child process, its answer and its refusals."""

import asyncio
import os
import signal
import sys
from itertools import pairwise
from pathlib import Path

import msgspec
import orjson
import psutil
import pytest

from daemon.config import DaemonConfig, read_config
from daemon.errors import ConfigError, StartFailed
from daemon.placement import placement_of
from daemon.planning import SearchStopped, planner_command, search, searched

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 1,
    "intermediate_size": 4096,
    "vocab_size": 30_000,
    "max_position_embeddings": 512,
}


@pytest.fixture
def config(tmp_path: Path) -> DaemonConfig:
    (tmp_path / "config.json").write_bytes(orjson.dumps(TINY))
    return DaemonConfig(
        model=str(tmp_path),
        placement="auto",
        node="here",
        workload="synthetic:32,8",
        rate=1.0,
        ttft="2s",
        tpot="500ms",
        kv_cache_gib=0.01,
        block_size=16,
    )


def test_what_the_planner_finds_is_what_is_served_B23(config: DaemonConfig, tmp_path: Path) -> None:
    found = searched(config, tmp_path)
    placement = placement_of(found)
    assert found == msgspec.structs.replace(config, placement=str(tmp_path / "placement.json"))
    nodes = {segment.node for spec in placement.instances for segment in spec.segments}
    assert nodes == {"here"}


def test_targets_that_nothing_can_meet_are_refused_in_the_planners_words(
    config: DaemonConfig, tmp_path: Path
) -> None:
    hopeless = msgspec.structs.replace(config, ttft="1us")
    with pytest.raises(ConfigError, match=r"no placement was found: .*TTFT .*the target is"):
        searched(hopeless, tmp_path)


def test_the_planner_is_asked_for_this_machine_and_this_service(
    config: DaemonConfig, tmp_path: Path
) -> None:
    command = planner_command(config, tmp_path / "out.json")
    asked = dict(pairwise(command))
    assert asked["--devices-per-node"] == str(len(os.sched_getaffinity(0)))
    assert (asked["--nodes"], asked["--block-size"]) == ("here", "16")
    assert asked["--max-total-tokens"] == "512"
    # 2 layers of keys and values of one head of 1024 numbers of 2 bytes.
    assert asked["--kv-tokens"] == str(int(0.01 * 2**30) // (2 * 2 * 1024 * 2))
    assert {"--workload=synthetic:32,8", "--rate=1.0", "--ttft=2s"} <= set(command)
    assert not [part for part in command if part.startswith("--profile")]


def test_what_is_for_a_search_needs_one() -> None:
    with pytest.raises(ConfigError, match="rate is for a placement that is searched"):
        read_config(None, {"rate": 2.0})
    assert read_config(None, {"rate": 2.0, "placement": "auto"}).rate == 2.0


async def test_a_signal_ends_the_search_and_its_helpers(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    os.mkfifo(pids)
    script = (
        "import os, subprocess, sys, time;"
        "helper = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']);"
        f"open({str(pids)!r}, 'w').write(f'{{os.getpid()}} {{helper.pid}}');"
        "time.sleep(60)"
    )
    searching = asyncio.ensure_future(search([sys.executable, "-c", script], 60))
    text = await asyncio.to_thread(pids.read_text)
    processes = [psutil.Process(int(pid)) for pid in text.split()]
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(SearchStopped):
        await searching
    assert psutil.wait_procs(processes, timeout=10)[1] == []


async def test_a_search_that_takes_too_long_is_given_up_B22() -> None:
    with pytest.raises(StartFailed, match="no placement was found within 0 s"):
        await search([sys.executable, "-c", "import time; time.sleep(60)"], 0.2)


async def test_a_planner_that_fails_is_no_wrong_configuration() -> None:
    with pytest.raises(StartFailed, match="the planner failed: ZeroDivisionError"):
        await search([sys.executable, "-c", "1 / 0"], 60)
