"""Names in the run directory by which the workers of one instance find each other."""

from pathlib import Path

import pytest

from daemon.errors import ConfigError
from daemon.meeting_points import Meeting, MeetingPoints
from ipc.run_dir import MAX_SOCKET_PATH, RunDir
from ipc.vocabulary import InstanceSpec, Parallelism, Role, Segment


def test_each_epoch_meets_somewhere_else_C11(tmp_path: Path) -> None:
    points = MeetingPoints(tmp_path)
    names = {points.plans(e) for e in (1, 2**62)} | {points.collectives(e) for e in (1, 2**62)}
    assert len(names) == 4


def test_a_run_directory_that_holds_the_daemons_socket_holds_a_groups() -> None:
    room = MAX_SOCKET_PATH - len(str(RunDir(Path("/x")).worker_socket))
    directory = Path("/x" + "x" * room)
    assert len(str(RunDir(directory).worker_socket)) == MAX_SOCKET_PATH
    path = MeetingPoints(directory).plans(2**63 - 1).removeprefix("ipc://")
    assert len(path) <= MAX_SOCKET_PATH


def test_what_an_epoch_met_by_goes_with_it_and_nothing_else_does(tmp_path: Path) -> None:
    points = MeetingPoints(tmp_path)
    paths = {e: Path(points.plans(e).removeprefix("ipc://")) for e in (1, 2)}
    for path in paths.values():
        path.touch()
    points.remove(1)
    points.remove(1)
    assert list(tmp_path.iterdir()) == [paths[2]]


def test_what_a_dead_daemon_left_is_swept_and_the_rest_is_not_C1(tmp_path: Path) -> None:
    Path(MeetingPoints(tmp_path).plans(7).removeprefix("ipc://")).touch()
    Path(MeetingPoints(tmp_path).collectives(7).removeprefix("file://")).touch()
    (tmp_path / "lock").touch()
    (tmp_path / "readme-not-ours").touch()
    MeetingPoints(tmp_path).sweep()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["lock", "readme-not-ours"]


def test_a_path_that_an_url_cannot_hold_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot meet in a path with #"):
        MeetingPoints(tmp_path / "a#b").collectives(1)


def spec(*nodes: str) -> InstanceSpec:
    segments = tuple(Segment(node, (i,)) for i, node in enumerate(nodes))
    return InstanceSpec("m", Role.MIXED, Parallelism(1, len(nodes)), segments)


def test_a_group_on_one_node_meets_in_the_run_directory_without_keys_C10(tmp_path: Path) -> None:
    points = MeetingPoints(tmp_path, "127.0.0.1")
    assert points.of(spec("n0"), 1) == Meeting()
    assert points.of(spec("n0", "n0"), 1) == Meeting(points.plans(1), points.collectives(1))


def test_a_group_across_nodes_meets_at_our_address_with_keys_of_its_epoch(tmp_path: Path) -> None:
    points = MeetingPoints(tmp_path, "127.0.0.1")
    first, second = (points.of(spec("n0", "n1"), epoch) for epoch in (1, 2))
    assert points.of(spec("n0", "n1"), 1) == first
    for meeting in (first, second):
        assert meeting.plans.startswith("tcp://127.0.0.1:")
        assert meeting.collectives.startswith("tcp://127.0.0.1:")
        assert meeting.plans != meeting.collectives
    assert first.keys.secret != second.keys.secret
    points.remove(1)
    assert points.of(spec("n0", "n1"), 1).keys != first.keys
