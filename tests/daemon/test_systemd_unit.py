"""The units and fragments: nothing that systemd warns about, nothing that libzmq is known to die
of, and a sandbox as tight as what is left."""

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

SYSTEMD = Path(__file__).parents[2] / "systemd"
SERVICES = ("distserved.service", "distserved@.service")
UNITS = (*SERVICES, "distserved.socket")
PROGRAM = "/opt/distserve/bin/distserve"
MAX_EXPOSURE = 18  # tenths; Debian's Redis has 12, nginx 96

needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed"
)
every_service = pytest.mark.parametrize("name", SERVICES)


def read(name: str) -> list[tuple[str, str]]:
    """Keys and values as a list, since a key of a unit may occur more than once."""
    lines = (SYSTEMD / name).read_text().splitlines()
    pairs = (line.partition("=") for line in lines if "=" in line and not line.startswith("#"))
    return [(key, value) for key, _, value in pairs]


def values(name: str, key: str) -> list[str]:
    return [value for found, value in read(name) if found == key]


def installed(directory: Path) -> Callable[[str], Path]:
    """All units side by side, as they would be found; an instance in place of the template."""
    for name in UNITS:
        # ExecStart must exist for `verify`.
        text = (SYSTEMD / name).read_text().replace(PROGRAM, "/bin/true")
        (directory / name).write_text(text)
    return lambda name: directory / name.replace("@.", "@a.")


def analyze(*words: str) -> subprocess.CompletedProcess[str]:
    command = ["systemd-analyze", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@needs_systemd
@pytest.mark.parametrize("name", UNITS)
def test_systemd_has_nothing_to_say_about_the_units(name: str, tmp_path: Path) -> None:
    # Unknown keys only print: output is failure.
    at = installed(tmp_path)
    if "@" in name:
        shutil.copy(tmp_path / name, at(name))
    result = analyze("verify", "--man=no", str(at(name)))
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


@needs_systemd
def test_systemd_would_have_said_something_about_a_broken_unit(tmp_path: Path) -> None:
    broken = tmp_path / "distserved.service"
    broken.write_text("[Service]\nExecStart=/bin/true\nKillMod=mixed\n")
    assert "KillMod" in analyze("verify", "--man=no", str(broken)).stderr


@needs_systemd
def test_the_drop_in_for_newer_systemds_says_nothing_that_they_do_not_know(tmp_path: Path) -> None:
    if int(analyze("--version").stdout.split()[1]) < 254:
        pytest.skip("this systemd is older than the drop-in is for")
    at = installed(tmp_path)
    (tmp_path / "distserved.service.d").mkdir()
    shutil.copy(SYSTEMD / "drop-in" / "10-systemd-254.conf", tmp_path / "distserved.service.d")
    result = analyze("verify", "--man=no", str(at("distserved.service")))
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


@needs_systemd
@every_service
def test_what_a_service_could_do_to_the_machine_is_little(name: str, tmp_path: Path) -> None:
    at = installed(tmp_path)
    if "@" in name:
        shutil.copy(tmp_path / name, at(name))
    threshold = f"--threshold={MAX_EXPOSURE}"
    result = analyze("security", "--offline=yes", "--no-pager", threshold, str(at(name)))
    assert result.returncode == 0, result.stdout.splitlines()[-1]


def test_the_template_differs_only_in_what_each_instance_has_for_itself() -> None:
    one, many = (read(name) for name in SERVICES)
    differing = {key for key, value in set(one) ^ set(many)}
    assert differing == {"Description", "ExecStart", "RuntimeDirectory", "SyslogIdentifier"}
    assert all("%i" in value for key, value in set(many) - set(one))


def test_no_instances_run_directory_is_inside_anothers() -> None:
    """systemd removes a run directory with all that is in it when its service stops."""
    for name in SERVICES:
        assert "/" not in values(name, "RuntimeDirectory")[0]


@every_service
def test_the_daemon_alone_speaks_to_systemd_and_alone_gets_sigterm(name: str) -> None:
    assert values(name, "Type") == ["notify"]
    assert values(name, "NotifyAccess") == ["main"]
    assert values(name, "KillMode") == ["mixed"]


@every_service
def test_exit_codes_that_would_come_back_are_not_restarted(name: str) -> None:
    assert values(name, "Restart") == ["on-failure"]
    assert values(name, "RestartPreventExitStatus") == ["64 78"]


@every_service
def test_the_sandbox_leaves_out_what_is_known_to_break_us(name: str) -> None:
    keys = {key for key, _ in read(name)}
    assert not keys & {"ProcSubset", "PrivateDevices", "MemoryDenyWriteExecute"}
    assert not any("@resources" in value for value in values(name, "SystemCallFilter"))
    assert "AF_NETLINK" in values(name, "RestrictAddressFamilies")[0].split()


@every_service
def test_files_that_the_service_makes_are_its_own_C4(name: str) -> None:
    assert values(name, "UMask") == ["0077"]
    assert values(name, "RuntimeDirectoryMode") == ["0750"]
    assert values(name, "User") == values(name, "Group") == ["distserve"]
    assert values(name, "RemoveIPC") == ["yes"]


@pytest.mark.skipif(shutil.which("systemd-sysusers") is None, reason="needs systemd-sysusers")
def test_the_services_user_is_a_system_user_whose_shared_memory_no_logout_removes_C4(
    tmp_path: Path,
) -> None:
    (tmp_path / "etc").mkdir()
    fragment = SYSTEMD / "sysusers.conf"
    command = ["systemd-sysusers", f"--root={tmp_path}", str(fragment)]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    name, _, uid, _, _, home, shell = (tmp_path / "etc" / "passwd").read_text().strip().split(":")
    assert (name, home, shell) == ("distserve", "/var/lib/distserved", "/usr/sbin/nologin")
    assert int(uid) < 1000
