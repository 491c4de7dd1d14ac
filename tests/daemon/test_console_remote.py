"""Consoles that come over TCP: with keys of ours, or not at all."""

import json
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import zmq
import zmq.asyncio

from daemon import console
from daemon.admin_commands import Undrain
from daemon.admin_door import KeyDoor
from daemon.admin_keys import make_console_keys, read_admin_keys, read_console_keys
from daemon.config import read_config
from daemon.errors import ConfigError
from ipc.curve import call_with, new_keys
from tests.daemon.console_house import House, ask, request_of, status_request


class RemoteHouse(House):
    """The same house with a port that any machine may knock at."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__(run_dir)
        self.keys = run_dir / "keys"
        make_console_keys(self.keys, "console")
        self.door = KeyDoor("tcp://127.0.0.1:0", read_admin_keys(self.keys))
        self.serve(self.door)

    async def call(self, *argv: str, keys: Path) -> int:
        return await self.run("--connect", self.door.address, "--keys", str(keys), *argv)


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[RemoteHouse]:
    opened = RemoteHouse(tmp_path)
    yield opened
    await opened.close()


async def test_a_console_with_our_keys_comes_in_and_the_log_names_them(
    house: RemoteHouse, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "daemon.admin_console")
    assert await house.call("status", "--json", keys=house.keys / "console.key") == 0
    assert json.loads(capsys.readouterr().out)["model"] == "smollm2"
    assert await house.call("undrain", keys=house.keys) == 6, "the directory will do as well"
    assert "Undrain, by console console, from 127.0.0.1" in caplog.text


async def test_an_unknown_key_is_refused_and_told_so(
    house: RemoteHouse,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    other = make_console_keys(house.keys, "late")  # after the daemon has read whom it lets in
    assert await house.call("status", "--json", keys=other) == 4
    told = capsys.readouterr()
    assert json.loads(told.out)["error"]["code"] == "not_permitted"
    assert "the daemon does not let our key in" in told.err
    assert "refused an unknown key from 127.0.0.1" in caplog.text
    assert house.operator.heard == []


async def test_a_key_that_is_taken_back_is_not_heard_any_more(
    house: RemoteHouse, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = house.keys / "console.key", make_console_keys(house.keys, "new")
    keys = read_console_keys(old)
    inside: zmq.asyncio.Socket = house.context.socket(zmq.DEALER)
    house.dealers.append(inside)
    inside.setsockopt(zmq.LINGER, 0)
    call_with(inside, keys.server, keys.own)
    inside.connect(house.door.address)
    assert (await ask(inside, status_request()))["answer"]["type"] == "StatusIs"
    (house.keys / "console.pub").unlink()
    house.door.admit(read_admin_keys(house.keys))
    assert (await ask(inside, status_request()))["answer"]["code"] == "not_permitted"
    assert await house.call("status", keys=old) == 4
    assert await house.call("status", keys=new) == 0


async def test_keys_of_another_daemon_are_refused(
    house: RemoteHouse, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    elsewhere = make_console_keys(tmp_path / "elsewhere", "console")
    assert await house.call("status", keys=elsewhere) in (3, 4)
    assert house.operator.heard == []


async def test_who_speaks_without_keys_is_not_heard(house: RemoteHouse) -> None:
    plain: zmq.asyncio.Socket = house.context.socket(zmq.DEALER)
    house.dealers.append(plain)
    plain.setsockopt(zmq.LINGER, 0)
    watched = plain.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
    plain.connect(house.door.address)
    await plain.send(request_of(Undrain()))
    await watched.recv_multipart()
    plain.disable_monitor()
    watched.close()
    assert (await ask(house.dealer(), status_request()))["answer"]["type"] == "StatusIs"
    assert not house.operator.orders


async def test_a_stranger_that_knocks_on_and_on_does_not_keep_others_out(
    house: RemoteHouse, caplog: pytest.LogCaptureFixture
) -> None:
    server = read_console_keys(house.keys).server
    for _ in range(20):
        stranger: zmq.asyncio.Socket = house.context.socket(zmq.DEALER)
        house.dealers.append(stranger)
        stranger.setsockopt(zmq.LINGER, 0)
        call_with(stranger, server, new_keys())
        stranger.connect(house.door.address)
    assert await house.call("status", keys=house.keys / "console.key") == 0
    refusals = [r for r in caplog.records if "unknown key" in r.message]
    assert len(refusals) < 20, "the log is not flooded"


def test_keys_are_their_owners_alone_and_not_overwritten(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    assert console.main(["keygen", str(keys)]) == 0
    assert console.main(["keygen", str(keys), "--name", "ops"]) == 0
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in keys.iterdir()}
    assert modes == {
        "server.key": 0o600, "console.key": 0o600, "console.pub": 0o644,
        "ops.key": 0o600, "ops.pub": 0o644,
    }  # fmt: skip
    assert stat.S_IMODE(keys.stat().st_mode) == 0o700
    assert sorted(read_admin_keys(keys).names.values()) == ["console", "ops"]
    before = (keys / "ops.key").read_bytes()
    assert console.main(["keygen", str(keys), "--name", "ops"]) == 78
    assert console.main(["keygen", str(keys), "--name", "../ops"]) == 78
    assert (keys / "ops.key").read_bytes() == before


def test_keys_that_others_may_read_are_refused(tmp_path: Path) -> None:
    path = make_console_keys(tmp_path / "keys", "console")
    path.chmod(0o640)
    with pytest.raises(ConfigError, match=r"console.key may be read by others: chmod 600"):
        read_console_keys(path)
    (tmp_path / "keys" / "server.key").chmod(0o644)
    with pytest.raises(ConfigError, match=r"server.key may be read by others"):
        read_admin_keys(tmp_path / "keys")


@pytest.mark.parametrize("content", [b"", b"[]", b'{"public": "a", "secret": "b", "server": "c"}'])
def test_what_holds_no_keys_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "console.key"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="holds no keys"):
        read_console_keys(path)


def test_secrets_are_not_shown(tmp_path: Path) -> None:
    path = make_console_keys(tmp_path / "keys", "console")
    keys = read_console_keys(path)
    assert keys.secret not in repr(keys)
    assert read_admin_keys(tmp_path / "keys").own.secret not in repr(
        read_admin_keys(tmp_path / "keys")
    )


def test_an_address_for_consoles_without_keys_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="consoles come over TCP with keys only: set admin_keys"):
        read_config(None, {"admin_address": "tcp://0.0.0.0:9471"})
    for address in ("ipc:///tmp/x", "tcp://host", "tcp://host:port", "host:1"):
        with pytest.raises(ConfigError, match=r"admin.address"):
            read_config(None, {"admin_address": address, "admin_keys": str(tmp_path)})
    with pytest.raises(ConfigError, match="`distserve console keygen` makes it"):
        read_admin_keys(tmp_path)
