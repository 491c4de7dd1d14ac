"""Keys of consoles that come over TCP, made by `distserve console keygen DIR`.

The directory holds the daemon's pair (`server.key`), a pair for each console that was made
(`NAME.key`, with the daemon's public half) and each console's public half (`NAME.pub`). The daemon
lets in whose `.pub` is there when it starts or reads its configuration again; a console needs its
`.key` alone.
"""

import os
import re
from pathlib import Path
from typing import TypeVar

import msgspec
import orjson

from daemon.errors import ConfigError
from ipc.curve import CurveKeys, new_keys

SERVER = "server"
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_KEY = re.compile(r"[\x21-\x7e]{40}")  # in Z85
_OTHERS = 0o077

T = TypeVar("T", "CurveKeys", "ConsoleKeys")


class ConsoleKeys(msgspec.Struct, frozen=True):
    """A console's own pair, and whom it talks to."""

    public: str
    secret: str
    server: str

    def __repr__(self) -> str:
        """Without the secret."""
        return f"ConsoleKeys({self.public}, server={self.server})"

    @property
    def own(self) -> CurveKeys:
        return CurveKeys(self.public, self.secret)


class AdminKeys(msgspec.Struct, frozen=True):
    """The daemon's: its pair, and the names of the consoles that it lets in, by public key."""

    own: CurveKeys
    names: dict[str, str]


def make_console_keys(directory: Path, name: str) -> Path:
    """A pair for one more console, and the daemon's where there is none yet; the console's file.

    Raises:
        ConfigError: that console has keys already, or they cannot be written.
    """
    if not _NAME.fullmatch(name) or name == SERVER:
        raise ConfigError(f"{name[:100]!r} is no name for a console: letters, digits, . _ -")
    pair = new_keys()
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not (directory / f"{SERVER}.key").exists():
            _write(directory / f"{SERVER}.key", new_keys(), 0o600)
        server = _read_pair(directory / f"{SERVER}.key", CurveKeys)
        path = directory / f"{name}.key"
        _write(path, ConsoleKeys(pair.public, pair.secret, server.public), 0o600)
        _write(directory / f"{name}.pub", pair.public, 0o644)
    except FileExistsError as error:
        raise ConfigError(f"{error.filename} is there already") from error
    except OSError as error:
        raise ConfigError(f"{directory}: no keys can be made: {error.strerror}") from error
    return path


def read_admin_keys(directory: Path) -> AdminKeys:
    """What a daemon needs. Raises ConfigError."""
    own = _read_pair(directory / f"{SERVER}.key", CurveKeys)
    try:
        names = {_public(path): path.stem for path in sorted(directory.glob("*.pub"))}
    except OSError as error:
        raise ConfigError(f"{directory} cannot be read: {error.strerror}") from error
    if not names:
        raise ConfigError(f"{directory} holds no console's .pub: nobody could come in")
    return AdminKeys(own, names)


def read_console_keys(path: Path) -> ConsoleKeys:
    """What a console needs: its `.key`, or a directory with a single one. Raises ConfigError."""
    if path.is_dir():
        found = [p for p in sorted(path.glob("*.key")) if p.stem != SERVER]
        if len(found) != 1:
            raise ConfigError(f"{path} holds {len(found)} consoles' keys: name the file of one")
        path = found[0]
    return _read_pair(path, ConsoleKeys)


def _public(path: Path) -> str:
    key: object = _json(path)
    if not isinstance(key, str) or not _KEY.fullmatch(key):
        raise ConfigError(f"{path} holds no public key")
    return key


def _read_pair(path: Path, kind: type[T]) -> T:
    try:
        if path.stat().st_mode & _OTHERS:
            raise ConfigError(f"{path} may be read by others: chmod 600 {path}")
        keys = msgspec.convert(_json(path), kind)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror}; `distserve console keygen` makes it"
        ) from error
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path} holds no keys: {error}") from error
    for key in msgspec.structs.astuple(keys):
        if not _KEY.fullmatch(key):
            raise ConfigError(f"{path} holds no keys: each has 40 printable characters")
    return keys


def _json(path: Path) -> object:
    try:
        value: object = orjson.loads(path.read_bytes())
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"{path} holds no keys: {error}") from error
    return value


def _write(path: Path, value: object, mode: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with open(descriptor, "wb") as file:
        file.write(orjson.dumps(msgspec.to_builtins(value), option=orjson.OPT_INDENT_2))
