"""The unit file: nothing that systemd warns about, nothing that libzmq is known to die of."""

import shutil
import subprocess
from pathlib import Path

import pytest

UNIT = Path(__file__).parents[2] / "systemd" / "distserved.service"

needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed"
)


def read_unit() -> dict[str, list[tuple[str, str]]]:
    """Sections as lists, since a key of a unit may occur more than once."""
    sections: dict[str, list[tuple[str, str]]] = {}
    for line in UNIT.read_text().splitlines():
        if line.startswith("["):
            sections[line.strip("[]")] = current = []
        elif line and not line.startswith("#"):
            key, _, value = line.partition("=")
            current.append((key, value))
    return sections


def values(key: str) -> list[str]:
    return [value for name, value in read_unit()["Service"] if name == key]


@needs_systemd
def test_systemd_has_nothing_to_say_about_the_unit(tmp_path: Path) -> None:
    # ExecStart must exist for `verify`, and unknown keys only print: output is failure.
    installed = tmp_path / UNIT.name
    program = "/opt/distserved/venv/bin/distserve"
    installed.write_text(UNIT.read_text().replace(program, "/bin/true"))
    command = ["systemd-analyze", "verify", "--man=no", str(installed)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


@needs_systemd
def test_systemd_would_have_said_something_about_a_broken_unit(tmp_path: Path) -> None:
    broken = tmp_path / UNIT.name
    broken.write_text("[Service]\nExecStart=/bin/true\nKillMod=mixed\n")
    command = ["systemd-analyze", "verify", "--man=no", str(broken)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "KillMod" in result.stderr


def test_the_daemon_alone_speaks_to_systemd_and_alone_gets_sigterm() -> None:
    assert values("Type") == ["notify"]
    assert values("NotifyAccess") == ["main"]
    assert values("KillMode") == ["mixed"]


def test_exit_codes_that_would_come_back_are_not_restarted() -> None:
    assert values("Restart") == ["on-failure"]
    assert values("RestartPreventExitStatus") == ["64 78"]


def test_the_sandbox_leaves_out_what_is_known_to_break_us() -> None:
    keys = {key for key, _ in read_unit()["Service"]}
    assert not keys & {"SystemCallFilter", "ProcSubset", "PrivateDevices", "MemoryDenyWriteExecute"}
    assert "AF_NETLINK" in values("RestrictAddressFamilies")[0].split()


def test_files_that_the_service_makes_are_its_own() -> None:
    assert values("UMask") == ["0077"]
    assert values("RuntimeDirectory") == ["distserved"]
    assert values("RuntimeDirectoryMode") == ["0750"]
    assert values("User") == values("Group") == ["distserve"]
