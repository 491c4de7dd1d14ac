"""The run directory: one owner, nothing left behind, clear refusals."""

import os
from pathlib import Path

import pytest

from ipc.run_dir import RunDir, RunDirBusy, RunDirUnusable, default_run_dir, owned


def test_a_second_owner_is_refused_and_told_who_has_it_C18(tmp_path: Path) -> None:
    with (
        owned(tmp_path / "run"),
        pytest.raises(RunDirBusy, match=f"process id {os.getpid()}"),
        owned(tmp_path / "run"),
    ):
        raise AssertionError("two owners")


def test_sockets_of_a_dead_owner_are_removed_at_the_start_and_ours_at_the_end_C1(
    tmp_path: Path,
) -> None:
    (tmp_path / "workers.ipc").touch()
    with owned(tmp_path) as run_dir:
        assert not run_dir.worker_socket.exists()
        run_dir.admin_socket.touch()
    assert os.listdir(tmp_path) == ["lock"]


def test_sockets_of_held_weights_go_with_their_owner_and_are_as_short_as_the_workers_C1(
    tmp_path: Path,
) -> None:
    dead = RunDir(tmp_path).weights_socket("0123456789abcdef" * 4)
    for leftover in (dead, Path(f"{dead}.lock")):
        leftover.touch()
    with owned(tmp_path) as run_dir:
        assert os.listdir(tmp_path) == ["lock"]
        assert len(str(dead)) <= len(str(run_dir.worker_socket))


def test_a_new_owner_may_come_after_the_old_one(tmp_path: Path) -> None:
    for _ in range(2):
        with owned(tmp_path):
            assert (tmp_path / "lock").read_text() == f"{os.getpid()}\n"


def test_a_path_too_long_for_a_socket_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunDirUnusable, match="too long"), owned(tmp_path / ("x" * 120)):
        raise AssertionError("usable")


def test_a_path_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunDirUnusable, match="File exists"), owned(tmp_path / "file"):
        raise AssertionError("usable")


def test_the_default_is_systemds_then_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNTIME_DIRECTORY", "/run/distserved")
    assert default_run_dir() == Path("/run/distserved")
    monkeypatch.delenv("RUNTIME_DIRECTORY")
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    assert default_run_dir() == Path("/run/user/7/distserved")


@pytest.mark.parametrize("name", ["lock", "workers.ipc", "admin.ipc"])
def test_a_directory_where_a_file_belongs_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(RunDirUnusable, match=f"{name}: Is a directory"), owned(tmp_path):
        raise AssertionError("usable")
