"""Who may use the API: keys with names and limits, from a file that only its owner can change.

A TOML file with a table for each name, which holds the key's SHA-256 and never has to hold the key:

    [alice]
    sha256 = "..."       # or key = "...", where it has to be readable
    max_requests = 8     # under way at once
    max_queued = 4       # of these, without a first token yet

In memory there are hashes alone, and every one of them is compared with what a client presents.
"""

import hashlib
import hmac
import os
import re
import secrets
import stat
import tomllib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec

from daemon.config import DaemonConfig
from daemon.config_errors import sentence_of
from daemon.errors import ConfigError, KeyLimit
from daemon.reload import Reloader

MODES = 0o640
"""All that may be allowed to anybody: the owner writes, a service's group reads."""
PREFIX = "sk-"  # what clients and scanners for leaked secrets take for a key
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")  # it stands in logs

Limit = Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]


class ApiKey(msgspec.Struct, frozen=True):
    """One of those who may; None is no limit."""

    name: str
    digest: bytes
    max_requests: int | None = None
    max_queued: int | None = None


class KeyRing:
    """The keys that are good now, and what each name has under way.

    What is under way stays when keys are exchanged: the counts are by name.
    """

    def __init__(self, keys: Sequence[ApiKey]) -> None:
        self._under_way: Counter[str] = Counter()
        self._queued: Counter[str] = Counter()
        self.replace(keys)

    def replace(self, keys: Sequence[ApiKey]) -> None:
        self._keys = tuple(keys)

    def find(self, presented: bytes) -> ApiKey | None:
        """Whose key that is. Takes as long for every key, and for none."""
        digest = hashlib.sha256(presented).digest()
        found = None
        for key in self._keys:
            if hmac.compare_digest(key.digest, digest):
                found = key
        return found

    def take_seat(self, key: ApiKey) -> "Seat":
        """Raises KeyLimit: as many are under way, or wait, as this name may have."""
        _check(self._under_way[key.name], key.max_requests, "requests under way")
        _check(self._queued[key.name], key.max_queued, "requests that wait for a first token")
        return Seat(key.name, self._under_way, self._queued)


class Seat:
    """One request's place within its key's limits. Everything may be said twice."""

    def __init__(self, name: str, under_way: Counter[str], queued: Counter[str]) -> None:
        self._name = name
        self._counts = [under_way, queued]
        for count in self._counts:
            count[name] += 1

    def has_token(self) -> None:
        """It waits no longer."""
        if len(self._counts) == 2:
            self._give_back()

    def leave(self) -> None:
        """It has ended."""
        while self._counts:
            self._give_back()

    def _give_back(self) -> None:
        count = self._counts.pop()
        count[self._name] -= 1
        if not count[self._name]:
            del count[self._name]


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A name's table in the file."""

    sha256: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-fA-F]{64}$")] | None = None
    key: Annotated[str, msgspec.Meta(pattern=r"^[!-~]{16,1024}$")] | None = None
    max_requests: Limit | None = None
    max_queued: Limit | None = None


def ring_of(config: DaemonConfig, reloader: Reloader) -> KeyRing | None:
    """The keys as configured, read again with every reload; None where nobody needs one.

    Raises:
        ConfigError: the file cannot be used. At a reload, the keys that were good stay so.
    """
    if config.api_keys is None:
        return None
    file = Path(config.api_keys)
    ring = KeyRing(read_keys(file))
    reloader.on_reload.append(lambda _: ring.replace(read_keys(file)))
    return ring


def read_keys(file: Path) -> list[ApiKey]:
    """Raises ConfigError: it cannot be read, others may read or write it, or it holds no keys."""
    try:
        values = tomllib.loads(_read_private(file))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file}: {_told(error)}") from error
    keys = [_key_of(file, name, entry) for name, entry in values.items()]
    if not keys:
        raise ConfigError(f"{file}: it holds no key; `distserve api-key NAME` makes one")
    _check_twins(file, keys)
    return keys


def make_key() -> str:
    """256 random bits."""
    return PREFIX + secrets.token_urlsafe(32)


def entry_of(name: str, key: str) -> str:
    """The lines for the file. Raises ConfigError: that is no name."""
    _check_name(name)
    header = name if "." not in name else f'"{name}"'
    return f'[{header}]\nsha256 = "{hashlib.sha256(key.encode()).hexdigest()}"\n'


def add_key(file: Path, name: str, key: str) -> None:
    """Write a name's hash behind what is there; a new file is its owner's alone.

    Raises:
        ConfigError: the name is there already, or the file cannot be used.
    """
    entry = entry_of(name, key)
    if file.exists() and any(known.name == name for known in read_keys(file)):
        raise ConfigError(f"{file}: there is a key for {name} already; remove its table first")
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        with open(descriptor, "a", encoding="utf-8") as stream:
            stream.write(entry if stream.tell() == 0 else f"\n{entry}")
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from error


def _check(count: int, limit: int | None, what: str) -> None:
    if limit is not None and count >= limit:
        raise KeyLimit(f"This key may have {limit} {what}, and has them.")


def _read_private(file: Path) -> str:
    with open(file, encoding="utf-8") as stream:
        mode = stat.S_IMODE(os.fstat(stream.fileno()).st_mode)
        if mode & ~MODES:
            raise ConfigError(
                f"{file}: its mode is {mode:04o}, so that others may read or change keys; "
                f"chmod 0600 (or {MODES:04o}, with the service's group)"
            )
        return stream.read()


def _told(error: Exception) -> str:
    """What is wrong, without a line of the file: it may hold a key."""
    return error.strerror or "unreadable" if isinstance(error, OSError) else f"no TOML: {error}"


def _key_of(file: Path, name: str, raw: Any) -> ApiKey:
    try:
        _check_name(name)
        entry = msgspec.convert(raw, _Entry)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error
    except msgspec.ValidationError as error:
        raise ConfigError(f"{file}: {sentence_of(error, _Entry, name)}") from None
    if (entry.sha256 is None) == (entry.key is None):
        raise ConfigError(f"{file}: {name}: set one of sha256 and key")
    if entry.key is not None:
        digest = hashlib.sha256(entry.key.encode()).digest()
    else:
        digest = bytes.fromhex(entry.sha256 or "")
    return ApiKey(name, digest, entry.max_requests, entry.max_queued)


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{name[:100]!r} is no name for a key: up to 64 letters, digits, dots, dashes and "
            "underscores"
        )


def _check_twins(file: Path, keys: Sequence[ApiKey]) -> None:
    names: dict[bytes, str] = {}
    for key in keys:
        if (other := names.setdefault(key.digest, key.name)) != key.name:
            raise ConfigError(f"{file}: {other} and {key.name} have the same key")
