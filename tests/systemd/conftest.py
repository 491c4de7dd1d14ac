"""A lab with the service in it, shared by all tests; skipped where none can be had."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu_workers.native_build import cache_directory
from tests.systemd import lab as labs
from tests.systemd import tiny_model
from tests.systemd.lab import Lab

MODEL = "/var/lib/distserved/models/tiny"


@pytest.fixture(scope="session")
def needs_lab() -> None:
    try:
        labs.check()
    except labs.NoLab as reason:
        pytest.skip(f"no systemd can be booted here: {reason}")


@pytest.fixture(scope="session")
def lab(needs_lab: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """Everything is installed, a tiny model included; no service is started."""
    directory = tmp_path_factory.mktemp("lab")
    model = tiny_model.make(directory / "tiny")
    with labs.booted(directory) as booted:
        booted.run(str(labs.ROOT / "systemd" / "install.sh"), "install-files")
        bring(booted, model)
        bring_kernels(booted)
        yield booted


def bring(lab: Lab, model: Path) -> None:
    """Put a model where the service reads its models."""
    lab.run("cp", "-R", str(model), MODEL)
    lab.run("chmod", "-R", "a+rX", MODEL)


def bring_kernels(lab: Lab) -> None:
    """What has been compiled before on this machine need not be compiled again."""
    cache = "/var/cache/distserved"
    lab.run("install", "-d", "-m", "0700", cache)
    if cache_directory().exists():
        lab.run("cp", "-R", str(cache_directory()), f"{cache}/distserved")
    lab.run("chown", "-R", "distserve:distserve", cache)


def configure(lab: Lab, name: str, **keys: object) -> None:
    """Write /etc/distserve/NAME.toml for the tiny model."""
    lines = [f'model = "{MODEL}"', tiny_model.SETTINGS]
    lines += [f"{key} = {value!r}".replace("'", '"') for key, value in keys.items()]
    lab.write(f"/etc/distserve/{name}.toml", "\n".join(lines))


def complete(lab: Lab, port: int = 8000, **body: object) -> dict[str, object]:
    """A short completion, asked for inside the lab."""
    answer: dict[str, object] = json.loads(lab.run(*curl(port, **body)))
    assert "choices" in answer, answer
    return answer


def curl(port: int = 8000, *options: str, **body: object) -> list[str]:
    """The command that asks for a completion."""
    sent = {"prompt": "hello", "max_tokens": 5, "temperature": 0} | body
    url = f"http://127.0.0.1:{port}/v1/completions"
    header = "Content-Type: application/json"
    return ["curl", "--silent", *options, url, "--header", header, "--data", json.dumps(sent)]


def assert_nothing_is_left(lab: Lab) -> None:
    """No process, no shared memory, no run directory."""
    assert [process.cmdline() for process in lab.processes()] == []
    assert lab.run("ls", "/dev/shm") == ""
    assert "distserved" not in lab.run("ls", "/run")
