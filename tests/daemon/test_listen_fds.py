"""Listeners that a service manager opened, taken over by a process of their own."""

import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

FAMILY_AND_ADDRESS = """
import os, sys
from daemon import listen_fds
from daemon.errors import ConfigError
try:
    listener = listen_fds.inherited()
except ConfigError as error:
    sys.exit(str(error))
left = [name for name in os.environ if name.startswith("LISTEN_")]
if listener is None:
    print("none", left)
else:
    print(listener.family.name, listener.getsockname()[1], os.get_inheritable(3), left)
"""


def passed(*descriptors: int, pid: str = "$$", **variables: str) -> tuple[str, str]:
    """(stdout, stderr) of a process that got these descriptors from 3 on, as systemd would."""
    # By way of 100 and on, since one may already be at another's place.
    aside = " ".join(f"{100 + i}<&{d}" for i, d in enumerate(descriptors))
    places = " ".join(f"{3 + i}<&{100 + i}" for i in range(len(descriptors)))
    given = {"LISTEN_FDS": str(len(descriptors))} | variables
    settings = " ".join(f"{name}={value}" for name, value in given.items())
    script = f"exec {aside}; exec {places}; {settings} LISTEN_PID={pid} exec {sys.executable} -c "
    done = subprocess.run(
        ["bash", "-c", f'{script} "$1"', "bash", FAMILY_AND_ADDRESS],
        pass_fds=descriptors,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip(), done.stderr.strip()


def listening(family: socket.AddressFamily, host: str) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.bind((host, 0))
    listener.listen()
    return listener


@pytest.mark.parametrize(
    ("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")]
)
def test_a_listener_is_taken_over_whatever_its_family(
    family: socket.AddressFamily, host: str
) -> None:
    try:
        listener = listening(family, host)
    except OSError:
        pytest.skip(f"{family.name} does not work here")
    with listener:
        port = listener.getsockname()[1]
        assert passed(listener.fileno()) == (f"{family.name} {port} False []", "")


def test_one_of_several_is_found_by_its_name() -> None:
    with listening(socket.AF_INET, "127.0.0.1") as one, listening(socket.AF_INET, "0") as other:
        said, _ = passed(one.fileno(), other.fileno(), LISTEN_FDNAMES="metrics:http")
        assert said == f"AF_INET {other.getsockname()[1]} False []"
        _, refusal = passed(one.fileno(), other.fileno())
        assert refusal.startswith("2 sockets were passed and none is named http")


def test_what_was_meant_for_another_process_is_left_alone() -> None:
    with listening(socket.AF_INET, "127.0.0.1") as listener:
        assert passed(listener.fileno(), pid="1") == ("none []", "")
    assert passed(LISTEN_FDS="0") == ("none []", "")
    assert passed(LISTEN_FDS="many") == ("none []", "")


def test_what_is_no_listening_tcp_socket_is_refused_in_one_sentence(tmp_path: Path) -> None:
    with socket.socket() as idle, socket.socket(socket.AF_UNIX) as local:
        local.bind(str(tmp_path / "socket"))
        local.listen()
        for unfit in (idle, local):
            _, refusal = passed(unfit.fileno())
            assert "is not a listening TCP socket" in refusal
            assert len(refusal.splitlines()) == 1
    with open(tmp_path / "file", "w") as file:
        assert passed(file.fileno())[1] == "descriptor 3 was passed, but is no socket"
    assert passed(LISTEN_FDS="1000")[1].endswith("was passed, but is not open")


@pytest.mark.skipif(
    shutil.which("systemd-socket-activate") is None, reason="needs systemd-socket-activate"
)
def test_systemds_own_way_of_passing_a_socket_is_understood() -> None:
    with listening(socket.AF_INET, "127.0.0.1") as free:
        port = free.getsockname()[1]
    answer = "from daemon import listen_fds; c, _ = listen_fds.inherited().accept(); c.send(b'me')"
    command = ["systemd-socket-activate", "-l", f"127.0.0.1:{port}", "--fdname=http"]
    command += [sys.executable, "-c", answer]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert "Listening on" in process.stderr.readline()
        with socket.create_connection(("127.0.0.1", port)) as client:
            assert client.recv(2) == b"me"
