"""The placement file: what is written is read again, and a wrong one says which field is wrong."""

from pathlib import Path
from typing import Any

import msgspec
import orjson
import pytest

from ipc.placement_file import (
    FileLoad,
    FileNode,
    FileOrigin,
    FileRange,
    PlacementError,
    PlacementFile,
    file_of,
    parse_placement,
    read_placement,
    to_json,
    write_placement,
)
from ipc.sharding import ModelSizes, layer_cut
from ipc.vocabulary import InstanceSpec, Parallelism, Role, Segment

LARGE_HEAD = ModelSizes(
    name="small",
    num_layers=4,
    num_heads=1,
    num_kv_heads=1,
    hidden_size=8,
    intermediate_size=8,
    vocab_size=112,
)
NODES = (FileNode("a", 8), FileNode("b", 8))
ORIGIN = FileOrigin(
    made="2026-11-29",
    planner="0.1",
    seed=3,
    load=FileLoad("sharegpt", None, 755.5, 200.3, 1.0),
    objective="goodput",
    affinity="low",
    inter_op=1,
    device="a100",
    ttft_s=0.25,
    tpot_s=0.1,
    attainment=0.9,
    goodput=FileRange(3.0, 2.5, None),
    goodput_per_device=FileRange(1.0, 0.8, None),
)


def instance(name: str, *segments: tuple[str, tuple[int, ...]], unit: int = 0) -> InstanceSpec:
    return InstanceSpec(
        name=name,
        role=Role(name.split("-")[0]),
        parallelism=Parallelism(tp=len(segments[0][1]), pp=len(segments)),
        segments=tuple(Segment(*segment) for segment in segments),
        unit=unit,
    )


def good() -> PlacementFile:
    """A prefill of two devices beside a decode of two stages."""
    specs = (instance("prefill-0", ("a", (0, 1))), instance("decode-0", ("a", (2,)), ("a", (3,))))
    return file_of("opt-13b", NODES, specs, ORIGIN)


def read_with(path: str, value: Any) -> PlacementFile:
    """The good file with one field changed, such as `instances.0.tp`."""
    raw = msgspec.to_builtins(good(), builtin_types=())
    raw = orjson.loads(orjson.dumps(raw))
    *parents, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    field = raw
    for parent in parents:
        field = field[parent]
    field[last] = value
    return parse_placement(orjson.dumps(raw))


def test_what_is_written_is_read_again_B23(tmp_path: Path) -> None:
    path = tmp_path / "placement.json"
    write_placement(path, good())
    assert read_placement(path) == good()
    assert path.read_text().startswith('{\n  "version": 1,\n  "model": "opt-13b"')


def test_a_daemon_gets_the_placement_with_its_segments() -> None:
    placement = parse_placement(to_json(good())).placement
    assert placement.model == "opt-13b"
    assert placement.instances[1].segments == (Segment("a", (2,)), Segment("a", (3,)))
    assert placement.instances[1].parallelism == Parallelism(tp=1, pp=2)


def test_a_placement_within_a_node_is_servable() -> None:
    assert good().servable
    assert good().crossings == ()


def test_a_pair_on_two_nodes_is_not_servable_and_is_named() -> None:
    specs = (instance("prefill-0", ("a", (0,))), instance("decode-0", ("b", (0,))))
    file = file_of("opt-13b", NODES, specs)
    assert not file.servable
    assert file.crossings == (
        "prefill-0 stage 0 (a) and decode-0 stage 0 (b) hold the same layers and share no node",
    )
    assert parse_placement(to_json(file)) == file


def test_stages_without_common_layers_may_be_apart() -> None:
    prefill = instance("prefill-0", ("a", (0,)), ("b", (0,)))
    assert prefill.first_gap(instance("decode-0", ("a", (1,)), ("b", (1,)))) is None
    assert prefill.first_gap(instance("decode-0", ("b", (1,)), ("a", (1,)))) == (0, 0)


@pytest.mark.parametrize(
    ("nodes", "gap"),
    [("aabb", None), ("aaab", (1, 2)), ("abbb", (0, 1)), ("aabbb", (0, 2)), ("aaabb", (1, 2))],
)
def test_stages_of_different_depths_overlap_by_their_share_of_the_layers(
    nodes: str, gap: tuple[int, int] | None
) -> None:
    """Of five stages the middle one holds layers of both halves."""
    prefill = instance("prefill-0", ("a", (0,)), ("b", (0,)))
    decode = instance("decode-0", *((node, (1 + k,)) for k, node in enumerate(nodes)))
    assert prefill.first_gap(decode) == gap


def test_where_the_model_is_known_its_stages_are_as_they_are_cut() -> None:
    """A head that weighs as much as two of four layers leaves the second of two stages one."""
    cut = layer_cut(LARGE_HEAD)
    prefill = instance("prefill-0", ("a", (0,)), ("b", (0,)))
    decodes = [
        instance("decode-0", *((node, (1 + k,)) for k, node in enumerate(nodes)))
        for nodes in ("aabb", "aaab")
    ]
    assert [prefill.first_gap(decode) for decode in decodes] == [None, (1, 2)]
    assert [prefill.first_gap(decode, cut) for decode in decodes] == [(0, 2), None]


def test_a_file_is_servable_if_both_who_knows_the_model_and_who_does_not_can_serve_it() -> None:
    cut = layer_cut(LARGE_HEAD)
    prefill = instance("prefill-0", ("a", (0,)), ("b", (0,)))
    for nodes in ("aabb", "aaab"):
        decode = instance("decode-0", *((node, (1 + k,)) for k, node in enumerate(nodes)))
        assert not file_of("small", NODES, [prefill, decode], cut=cut).servable
    same = instance("decode-0", ("a", (1,)), ("b", (1,)))
    assert file_of("small", NODES, [prefill, same], cut=cut).servable


def test_units_do_not_hand_over_to_each_other() -> None:
    specs = [
        instance(f"{role}-{unit}", (node, (device,)), unit=unit)
        for unit, node in enumerate("ab")
        for device, role in enumerate(("prefill", "decode"))
    ]
    assert file_of("opt-13b", NODES, specs).servable


@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        ("version", 2, "the placement file has version 2, this program reads version 1"),
        ("version", "1", "no placement file"),
        ("instances.0.role", "both", "Invalid enum value 'both' - at `$.instances[0].role`"),
        ("instances.0.tp", 0, "Expected `int` >= 1 - at `$.instances[0].tp`"),
        ("instances.0.colour", 1, "unknown field `colour` - at `$.instances[0]`"),
        ("instances.0.tp", 3, "$.instances[0].stages[0]: prefill-0 has tp 3"),
        ("instances.1.pp", 3, "$.instances[1]: decode-0 has pp 3, so it needs that many stages"),
        ("instances.1.stages.1.stage", 0, "$.instances[1].stages[1]: stages come in order"),
        ("instances.1.stages.1.devices", [2], "device 2 of a is taken twice, here for decode-0"),
        ("instances.0.stages.0.devices", [1, 1], "device 1 of a is taken twice"),
        ("instances.1.stages.1.devices", [8], "so there is no device 8"),
        ("instances.1.stages.0.node", "c", "there is no node 'c' among a, b"),
        ("instances.1.name", "prefill-0", "the instance prefill-0 is there 2 times"),
        ("instances.1.unit", 1, "prefill-0 has no counterpart: unit 0 has no decode instance"),
        ("instances.1.role", "prefill", "has no counterpart: unit 0 has no decode instance"),
        ("instances.0.chunk_tokens", 512, "$.instances[0].chunk_tokens is for mixed instances"),
        ("instances.1.stages.1.node", "b", "$.servable is true, but prefill-0 stage 0 (a)"),
        ("nodes.1.name", "a", "$.nodes: the node a is there 2 times"),
        ("nodes", [], "$.nodes is empty"),
        ("instances", [], "$.instances is empty"),
    ],
)
def test_a_wrong_field_is_named(path: str, value: object, told: str) -> None:
    with pytest.raises(PlacementError) as caught:
        read_with(path, value)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_is_not_json_or_not_there_says_which_file(tmp_path: Path) -> None:
    path = tmp_path / "broken.json"
    path.write_text("{")
    with pytest.raises(PlacementError, match=r"broken\.json: not JSON: "):
        read_placement(path)
    with pytest.raises(PlacementError, match=r"none\.json cannot be read: No such file"):
        read_placement(tmp_path / "none.json")
    with pytest.raises(PlacementError, match="cannot be written"):
        write_placement(tmp_path, good())


def test_mixed_instances_need_no_counterpart() -> None:
    file = file_of("opt-13b", NODES, (instance("mixed-0", ("a", (0,)), ("b", (0,))),))
    assert parse_placement(to_json(file)).servable
