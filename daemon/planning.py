"""`--placement auto`: let the planner choose, as a child process, before anything is started.

It looks at placements that separate the phases, on the devices of this node, for the configured
workload, rate and targets, and writes the best into the run directory, where it is read like any
other file and can be looked at. A signal ends the search, and it is bounded like a start.
"""

import asyncio
import logging
import os
import signal
import sys
from pathlib import Path

import msgspec

from daemon.config import SEARCHED, DaemonConfig, model_context
from daemon.errors import ConfigError, ExitError, StartFailed
from daemon.model_sizes import read_outline
from daemon.placement import LOCAL_NODE
from ipc.placement_file import PlacementError, PlacementFile, read_placement
from ipc.vocabulary import Role

logger = logging.getLogger(__name__)

_DEVICE = "cpu-core"  # the planner's sheet of one
_FILE = "placement.json"


class SearchStopped(ExitError):
    """A signal came while the planner searched: stopped on request."""

    exit_code = 0


def searched(config: DaemonConfig, run_dir: Path) -> DaemonConfig:
    """The same configuration, with the file of the placement that was found in place of `auto`.

    Raises:
        ConfigError: the planner refuses what it was asked, or finds nothing, in its own words.
        StartFailed: it failed or took too long.
        SearchStopped: SIGTERM or SIGINT.
    """
    file = run_dir / _FILE
    file.unlink(missing_ok=True)
    logger.info("searching a placement for %s", config.model_id)
    asyncio.run(search(planner_command(config, file), config.start_timeout_s))
    _tell(file)
    return msgspec.structs.replace(config, placement=str(file))


async def search(command: list[str], timeout_s: float) -> None:
    """Run the planner in a process group of its own, which also holds its helpers.

    Raises as `searched` does.
    """
    planner = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        process_group=0,
    )
    talk = asyncio.ensure_future(planner.communicate())
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, talk.cancel)
    try:
        async with asyncio.timeout(timeout_s):
            _, words = await talk
    except TimeoutError as error:
        raise StartFailed(f"no placement was found within {timeout_s:.0f} s") from error
    except asyncio.CancelledError as error:
        raise SearchStopped("stopped while a placement was searched") from error
    finally:
        if planner.returncode is None:
            os.killpg(planner.pid, signal.SIGKILL)
            await planner.wait()
    if planner.returncode != 0:
        _refuse(planner.returncode, words.decode(errors="replace"))


def planner_command(config: DaemonConfig, file: Path) -> list[str]:
    """What the planner is asked. Keys that are not set are left to its defaults."""
    given = {key: getattr(config, key) for key in SEARCHED}
    options = [f"--{key}={value}" for key, value in given.items() if value is not None]
    return [
        *(sys.executable, "-P", "-m", "planner", "plan", "--quick", "--allow-roofline"),
        *("--model", str(config.model_dir.resolve()), "--device", _DEVICE),
        *("--nodes", config.node or LOCAL_NODE),
        *("--devices-per-node", str(len(os.sched_getaffinity(0)))),
        *("--max-total-tokens", str(model_context(config)), "--max-batch", str(config.max_batch)),
        *("--kv-tokens", str(_kv_tokens(config)), "--block-size", str(config.block_size)),
        *("--prefill-policy", config.prefill_policy),
        *("--pull-stalls-decode", "--out", str(file)),
        *options,
    ]


def _tell(file: Path) -> None:
    found = _read(file)
    shapes = [f"{i.name} (tp {i.tp}, pp {i.pp})" for i in found.instances]
    logger.info("found %s; see %s", ", ".join(shapes), file)
    if found.origin is not None:
        goodput = found.origin.goodput.value
        logger.info("predicted: %.3g requests/s within the targets", goodput)


def _read(file: Path) -> PlacementFile:
    try:
        return read_placement(file)
    except PlacementError as error:
        raise StartFailed(f"the planner wrote no placement: {error}") from error


def _kv_tokens(config: DaemonConfig) -> int:
    """What the smallest pool of one worker holds of a whole model; more workers hold more."""
    per_token = read_outline(config).kv_values_per_token * config.dtype.num_bytes
    return max(1, min(config.kv_bytes(role) for role in Role) // per_token)


def _refuse(exit_code: int | None, words: str) -> None:
    """The planner's last line says why."""
    reason = (words.strip().splitlines() or [f"exit code {exit_code}"])[-1]
    reason = reason.removeprefix("distserve plan: ")
    if exit_code == 2:
        raise ConfigError(f"no placement was found: {reason}")
    raise StartFailed(f"the planner failed: {reason}")
