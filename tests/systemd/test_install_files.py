"""What `make install` puts where besides the program, below a DESTDIR; nothing is run there."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.systemd.lab import ROOT

SCRIPT = ROOT / "systemd" / "install.sh"
SHIPPED = (ROOT / "systemd" / "node.toml").read_text()


def script(destination: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"DESTDIR": str(destination), "SYSTEMD_VERSION": "252"} | variables
    return subprocess.run(
        ["sh", str(SCRIPT), *words], env=environment, capture_output=True, text=True, check=False
    )


def install(destination: Path, **variables: str) -> None:
    done = script(destination, "install-files", **variables)
    assert done.returncode == 0, done.stderr


def files(destination: Path) -> set[str]:
    found = (path for path in destination.rglob("*") if path.is_file() or path.is_symlink())
    return {path.relative_to(destination).as_posix() for path in found}


def test_units_fragments_and_a_configuration_go_to_their_places(tmp_path: Path) -> None:
    install(tmp_path)
    assert files(tmp_path) == {
        "etc/distserve/node.toml",
        "etc/systemd/system/distserved.service",
        "etc/systemd/system/distserved@.service",
        "etc/systemd/system/distserved.socket",
        "etc/sysusers.d/distserved.conf",
        "etc/tmpfiles.d/distserved.conf",
    }


def test_units_name_the_prefix_that_was_chosen(tmp_path: Path) -> None:
    install(tmp_path, PREFIX="/srv/llm")
    unit = (tmp_path / "etc/systemd/system/distserved.service").read_text()
    assert "ExecStart=/srv/llm/bin/distserve serve" in unit
    assert "/opt/distserve" not in unit


@pytest.mark.parametrize(("version", "is_there"), [("252", False), ("254", True), ("261", True)])
def test_the_drop_in_is_installed_where_systemd_reads_it(
    tmp_path: Path, version: str, is_there: bool
) -> None:
    install(tmp_path, SYSTEMD_VERSION=version)
    for service in ("distserved.service.d", "distserved@.service.d"):
        assert (tmp_path / "etc/systemd/system" / service).exists() is is_there


def test_an_operators_configuration_is_kept_and_the_new_one_put_beside_it(tmp_path: Path) -> None:
    install(tmp_path)
    config = tmp_path / "etc/distserve/node.toml"
    install(tmp_path)
    assert not config.with_name("node.toml.dist").exists()
    config.write_text('model = "/srv/ours"\n')
    install(tmp_path)
    assert config.read_text() == 'model = "/srv/ours"\n'
    assert config.with_name("node.toml.dist").read_text() == SHIPPED


def test_uninstalling_leaves_configuration_models_and_what_others_put_there(tmp_path: Path) -> None:
    install(tmp_path)
    ours = tmp_path / "etc/systemd/system/distserved.service.d/ours.conf"
    ours.parent.mkdir()
    ours.write_text("[Service]\n")
    neighbour = tmp_path / "opt/distserve/notes.txt"
    model = tmp_path / "var/lib/distserved/models/m/config.json"
    for file in (neighbour, model):
        file.parent.mkdir(parents=True)
        file.write_text("{}")
    assert script(tmp_path, "uninstall").returncode == 0
    kept = {ours, neighbour, model, tmp_path / "etc/distserve/node.toml"}
    assert files(tmp_path) == {path.relative_to(tmp_path).as_posix() for path in kept}


def test_purging_takes_configuration_and_models_along(tmp_path: Path) -> None:
    install(tmp_path)
    (tmp_path / "var/lib/distserved/models").mkdir(parents=True)
    assert script(tmp_path, "uninstall", PURGE="1").returncode == 0
    assert files(tmp_path) == set()
    assert not (tmp_path / "var/lib/distserved").exists()


@pytest.mark.parametrize("prefix", ["here", "/home/me/distserve", "/tmp/distserve", "/opt/a b"])
def test_a_place_that_the_service_could_not_see_is_refused_in_one_sentence(
    tmp_path: Path, prefix: str
) -> None:
    done = script(tmp_path, "install-files", PREFIX=prefix)
    assert done.returncode != 0
    assert prefix in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert files(tmp_path) == set()


def test_an_interpreter_that_the_service_could_not_see_is_refused(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho /home/me/bin/python3\n")
    python.chmod(0o755)
    done = script(tmp_path, "check", str(python))
    assert done.returncode != 0
    assert "/home/me/bin/python3 cannot be the service's Python" in done.stderr
