"""Installed, used, upgraded and taken off again as the README says, on a machine without network.

What pip would fetch is in the environment already, as after an earlier installation.
"""

from collections.abc import Iterator

import pytest

from tests.systemd import lab as labs
from tests.systemd import tiny_model
from tests.systemd.conftest import MODEL, assert_nothing_is_left, bring, complete
from tests.systemd.lab import ROOT, Lab

UNIT = "distserved.service"
CONFIG = "/etc/distserve/node.toml"
SETTINGS = f'model = "{MODEL}"\n{tiny_model.SETTINGS}'

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def bare(needs_lab: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    directory = tmp_path_factory.mktemp("bare")
    with labs.booted(directory, is_installed=False) as lab:
        yield lab


def make(lab: Lab, *words: str) -> str:
    python = "PYTHON=/opt/python/bin/python3"
    return lab.run("env", "PIP_NO_INDEX=1", "make", "-C", str(ROOT), *words, python)


def exists(lab: Lab, path: str) -> bool:
    return lab.run("sh", "-c", f"test -e {path} && echo yes", check=False) == "yes\n"


def test_a_service_is_installed_used_upgraded_and_taken_off_again(bare: Lab) -> None:
    lab = bare
    assert "models fetch" in make(lab, "install")
    assert f'model = "{MODEL.replace("tiny", "smollm2")}"' in lab.run("cat", CONFIG)
    bring(lab, tiny_model.make(lab.directory / "tiny"))
    lab.write(CONFIG, SETTINGS)
    lab.systemctl("enable", "--now", "distserved")
    assert complete(lab)
    console = "distserve console status --run-dir /run/distserved"
    assert "tiny" in lab.run(*console.split())

    assert "node.toml.dist" in make(lab, "install")
    assert lab.run("cat", CONFIG) == SETTINGS
    lab.systemctl("restart", "distserved")
    assert complete(lab)

    assert "Kept" in make(lab, "uninstall")
    assert_nothing_is_left(lab)
    assert lab.systemctl("is-enabled", UNIT, check=False).strip() != "enabled"
    assert exists(lab, CONFIG)
    assert exists(lab, MODEL)
    for gone in ("/opt/distserve/bin", "/var/cache/distserved", f"/etc/systemd/system/{UNIT}"):
        assert not exists(lab, gone), gone

    make(lab, "uninstall", "PURGE=1")
    assert not exists(lab, "/etc/distserve")
    assert not exists(lab, "/var/lib/distserved")
    assert "distserve" not in lab.run("cat", "/etc/passwd", "/etc/group")
    left = "find /etc /var /opt /run -name *distserve* -not -path /opt/packages/*"
    assert lab.run(*left.split()) == ""
