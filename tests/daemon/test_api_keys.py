"""Keys: read from a private file, held as hashes, bounded by name."""

import hashlib
import os
from pathlib import Path

import pytest

from daemon.__main__ import main
from daemon.api_keys import ApiKey, KeyRing, add_key, make_key, read_keys, ring_of
from daemon.config import DaemonConfig
from daemon.errors import ConfigError, KeyLimit
from daemon.reload import Reloader

SECRET = "sk-alice-0123456789"
BOB = "sk-bob-0123456789-abc"


def written(directory: Path, text: str, mode: int = 0o600) -> Path:
    file = directory / "keys.toml"
    file.write_text(text)
    file.chmod(mode)
    return file


def test_a_key_is_found_by_itself_alone_and_held_as_a_hash(tmp_path: Path) -> None:
    digest = hashlib.sha256(BOB.encode()).hexdigest()
    file = written(
        tmp_path, f'[alice]\nkey = "{SECRET}"\nmax_requests = 2\n[bob]\nsha256 = "{digest}"'
    )
    keys = read_keys(file)
    ring = KeyRing(keys)
    assert SECRET not in repr(keys)
    alice, bob = ring.find(SECRET.encode()), ring.find(BOB.encode())
    assert alice is not None
    assert bob is not None
    assert (alice.name, alice.max_requests, bob.name) == ("alice", 2, "bob")
    for wrong in (b"", SECRET[:-1].encode(), SECRET.upper().encode(), digest.encode(), b"\xff\x00"):
        assert ring.find(wrong) is None


@pytest.mark.parametrize("mode", [0o644, 0o660, 0o604, 0o700, 0o602])
def test_a_file_that_others_may_read_or_change_is_refused_with_its_mode(
    tmp_path: Path, mode: int
) -> None:
    file = written(tmp_path, f'[alice]\nkey = "{SECRET}"', mode)
    with pytest.raises(ConfigError, match=f"mode is {mode:04o}.*chmod 0600"):
        read_keys(file)


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o400, 0o440])
def test_a_private_file_is_taken(tmp_path: Path, mode: int) -> None:
    assert len(read_keys(written(tmp_path, f'[alice]\nkey = "{SECRET}"', mode))) == 1


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "holds no key"),
        ("[", "no TOML"),
        ("[a]\n", "a: set one of sha256 and key"),
        (f'[a]\nkey = "{SECRET}"\nsha256 = "{"0" * 64}"', "a: set one of sha256 and key"),
        ('[a]\nkey = "short"', r"a\.key: it does not look like one"),
        ('[a]\nsha256 = "12"', r"a\.sha256: it does not look like one"),
        (f'["a b"]\nkey = "{SECRET}"', "'a b' is no name for a key"),
        (f'[a]\nkeys = "{SECRET}"', "a: there is no key 'keys'; is key meant"),
        (f'[a]\nkey = "{SECRET}"\nmax_queued = 0', r"a\.max_queued: it must be at least 1"),
        (f'[a]\nkey = "{SECRET}"\n[b]\nkey = "{SECRET}"', "a and b have the same key"),
        (f'a = "{SECRET}"', "a: it must be a table, not a text"),
    ],
)
def test_a_file_that_cannot_be_used_is_one_sentence_without_a_key_in_it(
    tmp_path: Path, text: str, why: str
) -> None:
    with pytest.raises(ConfigError, match=rf"keys\.toml: .*{why}") as refused:
        read_keys(written(tmp_path, text))
    assert SECRET not in str(refused.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml: No such file"):
        read_keys(tmp_path / "none.toml")


def test_a_name_may_have_so_many_requests_and_gets_the_place_of_one_that_ended() -> None:
    key = ApiKey("alice", b"", max_requests=2)
    ring = KeyRing([key])
    first, _ = ring.take_seat(key), ring.take_seat(key)
    with pytest.raises(KeyLimit, match="2 requests under way"):
        ring.take_seat(key)
    ring.take_seat(ApiKey("bob", b"", max_requests=1))
    first.leave()
    first.leave()
    ring.take_seat(key)
    with pytest.raises(KeyLimit):
        ring.take_seat(key)


def test_who_has_its_first_token_waits_no_longer() -> None:
    key = ApiKey("alice", b"", max_queued=1)
    ring = KeyRing([key])
    first = ring.take_seat(key)
    with pytest.raises(KeyLimit, match="1 requests that wait"):
        ring.take_seat(key)
    first.has_token()
    first.has_token()
    second = ring.take_seat(key)
    first.leave()
    with pytest.raises(KeyLimit):
        ring.take_seat(key)
    second.leave()
    ring.take_seat(key)


def test_a_reload_takes_new_keys_and_keeps_the_old_where_the_file_cannot_be_used(
    tmp_path: Path,
) -> None:
    file = written(tmp_path, f'[alice]\nkey = "{SECRET}"')
    config = DaemonConfig(api_keys=str(file))
    reloader = Reloader(config, lambda: config)
    ring = ring_of(config, reloader)
    assert ring is not None
    written(tmp_path, f'[bob]\nkey = "{BOB}"')
    reloader.reload()
    assert ring.find(SECRET.encode()) is None
    assert ring.find(BOB.encode()) is not None
    written(tmp_path, "broken")
    reloader.reload()
    assert ring.find(BOB.encode()) is not None


def test_without_a_file_nobody_is_asked() -> None:
    config = DaemonConfig()
    assert ring_of(config, Reloader(config, lambda: config)) is None


def test_an_added_key_is_kept_as_a_hash_in_a_file_of_mode_0600(tmp_path: Path) -> None:
    file, key = tmp_path / "keys.toml", make_key()
    add_key(file, "alice", key)
    add_key(file, "team.b", make_key())
    assert file.stat().st_mode & 0o777 == 0o600
    assert key not in file.read_text()
    found = KeyRing(read_keys(file)).find(key.encode())
    assert found is not None
    assert found.name == "alice"
    with pytest.raises(ConfigError, match="a key for alice already"):
        add_key(file, "alice", make_key())


def test_the_command_tells_a_key_once_and_its_hash_where_no_file_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "keys.toml"
    assert main(["api-key", "alice", "--file", str(file)]) == 0
    told = capsys.readouterr()
    found = KeyRing(read_keys(file)).find(told.out.strip().encode())
    assert found is not None
    assert main(["api-key", "bob"]) == 0
    told = capsys.readouterr()
    assert hashlib.sha256(told.out.strip().encode()).hexdigest() in told.err
    assert main(["api-key", "a b"]) == os.EX_CONFIG
