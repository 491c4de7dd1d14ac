"""Who gets a request among many instances: the shortest queue, the least loaded within reach."""

import pytest

from daemon.admission import Capacity
from daemon.instances import Instance, InstanceTable
from ipc.kv_layout import RankLayout, Span
from ipc.vocabulary import DType, InstanceSpec, Parallelism, Role, Segment
from tests.daemon.metric_samples import spec_of


def layout(num_blocks: int) -> RankLayout:
    return RankLayout(Span(0, 1), Span(0, 1), num_blocks, 4, 1, DType.FP32)


def instance(name: str, role: Role, *nodes: str, num_blocks: int = 100) -> Instance:
    """One stage on each of the nodes."""
    stages = tuple(Segment(node, (0,)) for node in nodes or ("n0",))
    spec = InstanceSpec(name, role, Parallelism(1, len(stages)), stages)
    return Instance(spec, 1, layout(num_blocks), lambda _: None)


def table(*instances: Instance) -> InstanceTable:
    up = InstanceTable()
    for one in instances:
        up.add(one)
    return up


def test_a_prompt_goes_on_only_to_where_its_blocks_can_be_pulled() -> None:
    here, there = instance("d0", Role.DECODE, "n0"), instance("d1", Role.DECODE, "n1")
    source = instance("p1", Role.PREFILL, "n1")
    there.sequences[1] = 90
    assert table(here, there, source).best_decode(10, source) is there


def test_instances_whose_place_nobody_told_reach_each_other() -> None:
    """It once was a division by their zero stages."""
    source, reader = (
        Instance(spec_of(name, role), 1, layout(10), lambda _: None)
        for name, role in (("p0", Role.PREFILL), ("d0", Role.DECODE))
    )
    assert table(source, reader).can_serve


def test_every_pair_of_stages_with_the_same_layers_must_share_a_node() -> None:
    source = instance("p", Role.PREFILL, "n0", "n1")
    whole, split = instance("d0", Role.DECODE, "n0"), instance("d1", Role.DECODE, "n0", "n1")
    up = table(source, whole)
    assert not up.can_serve
    assert up.best_decode(10, source) is None
    up.add(split)
    assert up.can_serve
    assert up.best_decode(10, source) is split


def test_who_has_nobody_to_hand_to_prefills_only_when_nobody_else_does() -> None:
    stranded, served = instance("p0", Role.PREFILL, "n0"), instance("p1", Role.PREFILL, "n1")
    decode = instance("d1", Role.DECODE, "n1")
    served.queued.add(1, arrival=1, num_tokens=1000, now_s=0.0)
    up = table(stranded, served, decode)
    assert up.best_prefill(10) is served
    up.remove("d1", 1)
    assert not up.can_serve
    assert up.best_prefill(10) is stranded


@pytest.mark.parametrize("kind", ["promised", "returning"])
def test_requests_are_taken_while_those_that_are_missing_come_back(kind: str) -> None:
    source, reader = instance("p", Role.PREFILL), instance("d", Role.DECODE)
    up = table(reader)
    assert not up.can_take
    getattr(up, kind)["p"] = source.spec
    assert up.can_take
    assert not up.can_serve
    up.remove("d", 1)
    assert not up.can_take, "nobody would decode"
    getattr(up, kind)["d"] = reader.spec
    assert up.can_take


def test_nobody_waits_for_one_whose_blocks_could_not_be_pulled() -> None:
    up = table(instance("d", Role.DECODE, "n1"))
    up.returning["p"] = instance("p", Role.PREFILL, "n0").spec
    assert not up.can_take


def test_a_mixed_instance_serves_alone_and_takes_prompts_of_others() -> None:
    mixed = instance("m", Role.MIXED)
    assert table(mixed).can_serve
    source = instance("p", Role.PREFILL)
    assert table(mixed, source).best_decode(10, source) is mixed


def test_among_reachable_ones_the_smaller_share_of_the_pool_and_then_the_batch_decides() -> None:
    source = instance("p", Role.PREFILL)
    large = instance("d0", Role.DECODE, num_blocks=400)
    small = instance("d1", Role.DECODE, num_blocks=100)
    up = table(source, large, small)
    large.sequences |= {1: 40}
    small.sequences |= {2: 20}
    assert up.best_decode(10, source) is large
    large.sequences |= {3: 20, 4: 20}
    assert up.best_decode(10, source) is small


@pytest.mark.parametrize("num_tokens", [300, 500])
def test_a_sequence_goes_only_where_it_fits(num_tokens: int) -> None:
    source = instance("p", Role.PREFILL, num_blocks=1000)
    large = instance("d0", Role.DECODE, num_blocks=100)
    up = table(source, large, instance("d1", Role.DECODE, num_blocks=50))
    large.sequences[1] = 99
    assert up.best_decode(num_tokens, source) is (large if num_tokens <= 400 else None)


def test_a_slow_prefill_instance_gets_less() -> None:
    """One computes 30 tokens while the other computes 10; prompts of 100 come every ten steps."""
    fast, slow = instance("p0", Role.PREFILL), instance("p1", Role.PREFILL)
    up = table(fast, slow, instance("d", Role.DECODE))
    speeds, num_given = {"p0": 30, "p1": 10}, {"p0": 0, "p1": 0}
    waiting: dict[str, list[tuple[int, int]]] = {"p0": [], "p1": []}
    for step in range(1000):
        if step % 3 == 0:
            chosen = up.best_prefill(100)
            assert chosen is not None
            num_given[chosen.name] += 1
            chosen.queued.add(step, arrival=step, num_tokens=100, now_s=0.0)
            waiting[chosen.name].append((step, 100))
        for one in (fast, slow):
            if queue := waiting[one.name]:
                request_id, num_left = queue.pop(0)
                if (num_left := num_left - speeds[one.name]) > 0:
                    one.queued.advance(request_id, speeds[one.name])
                    queue.insert(0, (request_id, num_left))
                else:
                    one.queued.finish(request_id)
    assert 2 < num_given["p0"] / num_given["p1"] < 4


def test_a_slow_decode_instance_gets_less() -> None:
    """Its sequences stay three times as long, so its pool is fuller."""
    fast, slow, source = (
        instance("d0", Role.DECODE),
        instance("d1", Role.DECODE),
        instance("p", Role.PREFILL),
    )
    up = table(fast, slow, source)
    stays, ends, num_given = {"d0": 20, "d1": 60}, {}, {"d0": 0, "d1": 0}
    for step in range(1000):
        for name, seq_id in ends.pop(step, []):
            up.get(name).sequences.pop(seq_id)  # type: ignore[union-attr]
        chosen = up.best_decode(10, source)
        assert chosen is not None
        num_given[chosen.name] += 1
        chosen.sequences[step] = 3
        ends.setdefault(step + stays[chosen.name], []).append((chosen.name, step))
    assert 2 < num_given["d0"] / num_given["d1"] < 4


def test_the_longest_request_is_what_the_smallest_instance_holds_in_all() -> None:
    """An instance's blocks are the same on all of its ranks: shapes do not multiply them."""
    capacity = Capacity(10_000)
    capacity.learn("p", layout(100))
    capacity.learn("d", layout(60))
    assert capacity.max_tokens == 240
