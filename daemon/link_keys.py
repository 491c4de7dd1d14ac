"""The keys, made by `distserve keygen DIR`, without which no daemon opens a socket to another node.

One pair for all nodes of a cluster, in one file that its owner alone may read. The directory is
copied to every node and named there as `link_keys`.
"""

import os
from pathlib import Path

import msgspec
import orjson

from daemon.config import DaemonConfig
from daemon.errors import ConfigError
from daemon.placement import guests_of, hosts_of, own_node
from ipc.curve import CurveKeys, new_keys
from ipc.vocabulary import Placement

KEY_FILE = "link.key"
_NUM_CHARACTERS = 40  # of a key in Z85
_OTHERS = 0o077


def make_keys(directory: Path) -> Path:
    """The file, made with a fresh pair.

    Raises:
        ConfigError: it is there already, or cannot be made.
    """
    path = directory / KEY_FILE
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "wb") as file:
            file.write(orjson.dumps(msgspec.to_builtins(new_keys()), option=orjson.OPT_INDENT_2))
    except FileExistsError as error:
        if not directory.is_dir():
            raise ConfigError(f"{directory} is no directory") from error
        raise ConfigError(f"{path} is there already; nodes that use it would be cut off") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be made: {error.strerror}") from error
    return path


def keys_for(config: DaemonConfig, placement: Placement) -> CurveKeys | None:
    """None where this node shares no instance with another one. Raises ConfigError."""
    node = own_node(config, placement)
    if not hosts_of(placement, node) and not guests_of(placement, node):
        return None
    assert config.link_keys is not None, "checked with the placement"
    return read_keys(Path(config.link_keys))


def read_keys(directory: Path) -> CurveKeys:
    """Raises ConfigError: there are none, others may read them, or they are no keys."""
    path = directory / KEY_FILE
    try:
        if path.stat().st_mode & _OTHERS:
            raise ConfigError(f"{path} may be read by others: chmod 600 {path}")
        keys = msgspec.convert(orjson.loads(path.read_bytes()), CurveKeys)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror}; `distserve keygen` makes it"
        ) from error
    except (orjson.JSONDecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"{path} holds no keys: {error}") from error
    if {len(keys.public), len(keys.secret)} != {_NUM_CHARACTERS}:
        raise ConfigError(f"{path} holds no keys: each has {_NUM_CHARACTERS} characters")
    return keys
