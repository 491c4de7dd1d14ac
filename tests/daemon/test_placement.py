"""Which instances run: counted out, or from a file; and what such a file may not say."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from daemon.config import DaemonConfig, NodeAddress
from daemon.errors import ConfigError
from daemon.placement import (
    counted_out,
    devices_in_use,
    guests_of,
    hosts_of,
    nodes_of,
    placement_of,
)
from ipc.placement_file import FileNode, file_of, to_json
from ipc.vocabulary import InstanceSpec, Parallelism, Role, Segment


def spec(name: str, role: Role, *stages: tuple[str, tuple[int, ...]], unit: int = 0) -> Any:
    shape = Parallelism(len(stages[0][1]), len(stages))
    return InstanceSpec(name, role, shape, tuple(Segment(*stage) for stage in stages), unit)


def written(directory: Path, *specs: InstanceSpec, model: str = "tiny", **changes: Any) -> str:
    nodes = sorted({segment.node for s in specs for segment in s.segments})
    file = file_of(model, [FileNode(node, 8) for node in nodes], specs)
    path = directory / "placement.json"
    path.write_bytes(to_json(msgspec.structs.replace(file, **changes)))
    return str(path)


PAIR = (
    spec("p", Role.PREFILL, ("n0", (4,)), ("n0", (1,))),
    spec("d", Role.DECODE, ("n0", (6, 7))),
)


def test_instances_are_numbered_by_role_and_devices_counted_through() -> None:
    placement = counted_out(DaemonConfig(prefill=2, decode=1, mixed=1))
    assert [(i.name, i.role, i.segments[0].devices) for i in placement.instances] == [
        ("prefill-0", Role.PREFILL, (0,)),
        ("prefill-1", Role.PREFILL, (1,)),
        ("decode-0", Role.DECODE, (2,)),
        ("mixed-0", Role.MIXED, (3,)),
    ]


def test_each_stage_of_a_shape_has_devices_of_its_own() -> None:
    config = DaemonConfig(prefill_tp=2, prefill_pp=2, decode=2, decode_tp=3, node="here")
    prefill, *decodes = counted_out(config).instances
    assert prefill.parallelism == Parallelism(2, 2)
    assert prefill.segments == (Segment("here", (0, 1)), Segment("here", (2, 3)))
    assert [d.segments for d in decodes] == [
        (Segment("here", (4, 5, 6)),),
        (Segment("here", (7, 8, 9)),),
    ]


def test_chunks_are_for_mixed_instances() -> None:
    placement = counted_out(DaemonConfig(mixed=1, chunk_tokens=64))
    assert [i.chunk_tokens for i in placement.instances] == [None, None, 64]


def test_a_file_says_which_instances_there_are(tmp_path: Path) -> None:
    placement = placement_of(DaemonConfig(placement=written(tmp_path, *PAIR)))
    assert placement.instances == PAIR
    assert devices_in_use(placement, "n0") == [1, 4, 6, 7]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"version": 2}, "has version 2, this program reads version 1"),
        ({"nodes": ()}, r"placement\.json: \$\.nodes is empty"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        placement_of(DaemonConfig(placement=written(tmp_path, *PAIR, **changes)))


def test_a_file_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match=r"/nowhere\.json cannot be read: No such file"):
        placement_of(DaemonConfig(placement="/nowhere.json"))


def test_stages_that_would_hand_over_across_nodes_are_not_servable_yet(tmp_path: Path) -> None:
    """The second half of the layers is on n1 for prefill, and on n0 for decode."""
    specs = (
        spec("p", Role.PREFILL, ("n0", (0,)), ("n1", (0,))),
        spec("d", Role.DECODE, ("n0", (1,)), ("n0", (2,))),
    )
    with pytest.raises(
        ConfigError,
        match=r"not servable yet: p stage 1 \(n1\) and d stage 1 \(n0\) hold the same layers",
    ):
        placement_of(DaemonConfig(placement=written(tmp_path, *specs), node="n0"))


ACROSS = (
    spec("p", Role.PREFILL, ("n0", (0,)), ("n1", (0,))),
    spec("d", Role.DECODE, ("n0", (1,)), ("n1", (1,))),
)
ADDRESSES = {name: NodeAddress(f"tcp://10.0.0.{i}:7400") for i, name in enumerate(("n0", "n1"))}


def test_a_placement_on_two_nodes_says_whose_home_is_where(tmp_path: Path) -> None:
    alone = spec("m", Role.MIXED, ("n2", (0, 1)), unit=1)
    placement = placement_of(
        DaemonConfig(
            placement=written(tmp_path, *ACROSS, alone),
            node="n0",
            nodes=ADDRESSES,
            link_keys=str(tmp_path),
        )
    )
    assert nodes_of(placement.instances) == ["n0", "n1", "n2"]
    assert [hosts_of(placement, n) for n in ("n0", "n1", "n2")] == [["n1"], [], []]
    assert [guests_of(placement, n) for n in ("n0", "n1", "n2")] == [[], ["n0"], []]
    assert devices_in_use(placement, "n1") == [0, 1]


@pytest.mark.parametrize("node", ["n0", "n1"])
@pytest.mark.parametrize(
    ("how", "why"),
    [
        ({"nodes": {}, "link_keys": "keys"}, r"there is no address in \[nodes\.n"),
        ({"nodes": ADDRESSES}, "nodes are joined with link_keys only"),
    ],
)
def test_nodes_that_share_an_instance_need_addresses_and_keys(
    tmp_path: Path, node: str, how: dict[str, Any], why: str
) -> None:
    config = DaemonConfig(placement=written(tmp_path, *ACROSS), node=node, **how)
    with pytest.raises(ConfigError, match=why):
        placement_of(config)


def test_a_placement_for_one_other_node_is_refused_only_when_we_have_a_name(
    tmp_path: Path,
) -> None:
    file = written(tmp_path, *PAIR)
    with pytest.raises(ConfigError, match="puts nothing on this node, here, but on n0"):
        placement_of(DaemonConfig(placement=file, node="here"))


def test_a_placement_that_was_made_for_another_directory_is_refused(tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    file = written(tmp_path, *PAIR, model=str(tmp_path / "one"))
    with pytest.raises(ConfigError, match=r"is for the model .*/one, but .*/other is to be served"):
        placement_of(DaemonConfig(placement=file, model=str(tmp_path / "other")))
    same = DaemonConfig(placement=file, model=str(tmp_path / "other" / ".." / "one"))
    assert placement_of(same).instances == PAIR


@pytest.mark.parametrize("name", ["a/b", "x" * 65, "new\nline"])
def test_a_name_that_would_break_addresses_or_labels_is_refused(tmp_path: Path, name: str) -> None:
    specs = (spec(name, Role.PREFILL, ("n0", (0,))), PAIR[1])
    with pytest.raises(ConfigError, match="an instance is called"):
        placement_of(DaemonConfig(placement=written(tmp_path, *specs)))
