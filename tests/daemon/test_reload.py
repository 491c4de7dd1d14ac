"""SIGHUP: what changes, what is refused by name, and what a broken file does: nothing."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from daemon.config import DaemonConfig, read_config
from daemon.errors import ConfigError
from daemon.reload import Reloader


@pytest.fixture(autouse=True)
def root_level() -> Iterator[None]:
    before = logging.getLogger().level
    yield
    logging.getLogger().setLevel(before)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "node.toml"
    file.write_text("port = 8000\n")
    return file


@pytest.fixture
def reloader(file: Path) -> Reloader:
    def read() -> DaemonConfig:
        return read_config(file, {})

    return Reloader(read(), read)


def test_the_log_level_and_the_drain_time_change_under_way(file: Path, reloader: Reloader) -> None:
    file.write_text('log_level = "debug"\ndrain_s = 5\n')
    reloader.reload()
    assert reloader.config.drain_s == 5
    assert logging.getLogger().level == logging.DEBUG


def test_what_takes_a_restart_is_named_and_stays(
    file: Path, reloader: Reloader, caplog: pytest.LogCaptureFixture
) -> None:
    file.write_text('port = 9000\ndecode = 2\nlog_level = "warning"\n')
    reloader.reload()
    assert "only a restart changes: port, decode" in caplog.text
    assert (reloader.config.port, reloader.config.decode) == (8000, 1)
    assert reloader.config.log_level == "warning"


@pytest.mark.parametrize("text", ["port = ", "no_such_key = 1\n", "drain_s = -1\n"])
def test_a_file_that_cannot_be_used_changes_nothing_and_ends_nothing(
    text: str, file: Path, reloader: Reloader, caplog: pytest.LogCaptureFixture
) -> None:
    before = reloader.config
    file.write_text(text)
    reloader.reload()
    assert reloader.config == before
    assert "not reloaded, the old configuration stays" in caplog.text


def test_others_hear_of_every_reload_and_one_that_refuses_stops_nobody(
    file: Path, reloader: Reloader, caplog: pytest.LogCaptureFixture
) -> None:
    heard: list[float] = []

    def refuse(_: DaemonConfig) -> None:
        raise ConfigError("keys.toml: not for everybody to read")

    reloader.on_reload += [refuse, lambda config: heard.append(config.drain_s)]
    reloader.reload()
    file.write_text("drain_s = 7\n")
    reloader.reload()
    assert heard == [30.0, 7.0]
    assert "not reloaded: keys.toml" in caplog.text


def test_the_configuration_that_is_installed_can_be_read() -> None:
    shipped = Path(__file__).parents[2] / "systemd" / "node.toml"
    assert read_config(shipped, {}).model == "/var/lib/distserved/models/smollm2"
