"""What admission goes by, as the configuration names it: a target, and a table of measured times.

The planner reads the same words and files with more care, for it fits what it reads; here a table
only has to say how long prompts take.
"""

import re
from pathlib import Path

import msgspec
import orjson

from daemon.config import SLO, DaemonConfig
from daemon.config_errors import reason_of
from daemon.door import Target
from daemon.errors import ConfigError
from daemon.slo import Targets
from ipc.profile_table import TABLE_VERSION, ProfileTable

_UNITS_S = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "": 1.0}
_MAX_S = 1e7


def target_of(config: DaemonConfig) -> Target | None:
    """What admission is to hold, if anything. Raises ConfigError."""
    if config.admission != SLO or config.ttft is None:
        return None
    table = read_table(Path(config.profile)) if config.profile else None
    if table is not None and table.dtype is not config.dtype:
        raise ConfigError(
            f"{config.profile} was measured in {table.dtype}, this service computes in "
            f"{config.dtype}: measure again by `distserve profile --dtype {config.dtype}`"
        )
    return Target(ttft_s=read_time_s(config.ttft, "ttft"), table=table)


def slo_of(config: DaemonConfig) -> Targets:
    """What answers are judged by. Raises ConfigError."""
    return Targets(
        ttft_s=read_time_s(config.ttft, "ttft") if config.ttft else None,
        tpot_s=read_time_s(config.tpot, "tpot") if config.tpot else None,
    )


def read_time_s(text: str, key: str) -> float:
    """`200ms`, `2s`, `50us` or a plain number of seconds, as the planner takes them.

    Raises:
        ConfigError: it is no time above zero.
    """
    match = re.fullmatch(r"([0-9]*\.?[0-9]+)\s*(us|ms|s|)", text.strip(), re.ASCII)
    value_s = float(match[1]) * _UNITS_S[match[2]] if match else 0.0
    if not 0 < value_s <= _MAX_S:
        raise ConfigError(f"{key} is a time above zero such as 200ms or 2s, not {text!r}")
    return value_s


def read_table(file: Path) -> ProfileTable:
    """What `distserve profile` wrote.

    Raises:
        ConfigError: it cannot be read, is another version's, or has no times of prefills.
    """
    try:
        body = orjson.loads(file.read_bytes())
        version = body.get("version") if isinstance(body, dict) else None
        if version != TABLE_VERSION:
            raise ConfigError(
                f"{file}: a profile of version {version}, and this daemon reads version "
                f"{TABLE_VERSION}; measure one by `distserve profile`"
            )
        table = msgspec.convert(body, ProfileTable)
    except (OSError, orjson.JSONDecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"{file}: {reason_of(error)}") from error
    if not table.prefill:
        raise ConfigError(f"{file}: prefill holds no steps")
    for number, point in enumerate(table.prefill):
        if not point.ms > 0:
            raise ConfigError(f"{file}: prefill[{number}].ms is {point.ms:g}, not above 0")
    return table
