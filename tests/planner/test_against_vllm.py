"""The simulator under vLLM's rules, against 300 requests that vLLM 0.19 served on an RTX 4090.

Nothing is fitted to that run: step times are the sums of its layer profile, and the engine's own
work between steps counts nothing, for vLLM schedules a step while the one before it computes.
"""

import time
from collections import OrderedDict
from functools import cache

import numpy as np
import pytest

from ipc.prefill_policy import BatchLimits
from ipc.vocabulary import Role
from planner.latency.interface import Chunk
from planner.simulator.run import simulate
from planner.simulator.service import InstanceModel, MixedRules, Service
from planner.simulator.timeline import Timeline
from planner.simulator.vllm import PrefixMemory
from planner.workload.requests import Requests
from tests.planner.line_model import LineModel, chat
from tests.planner.vllm_runs import (
    NUM_WARMING_UP,
    RTX4090,
    Seen,
    errors,
    layer_table,
    measured,
    replay,
    seen,
    under_our_rules,
    under_vllm_rules,
)

MODEL = LineModel()
LIMITS = BatchLimits(prefill_tokens=2048, max_batch=256)


@cache
def both() -> tuple[Timeline, Seen]:
    requests, real = measured(RTX4090)
    return replay(under_vllm_rules(RTX4090, layer_table(RTX4090)), requests), real


def error(name: str) -> float:
    timeline, real = both()
    return abs(errors(seen(timeline), real)[name])


@pytest.mark.parametrize("statistic", ["mean", "p50", "p90", "p99"])
def test_ttft_is_as_measured(statistic: str) -> None:
    assert error(f"ttft {statistic}") < 0.02


@pytest.mark.parametrize("statistic", ["mean", "p50", "p99"])
def test_tpot_is_as_measured(statistic: str) -> None:
    assert error(f"tpot {statistic}") < 0.02


def test_tpot_of_those_that_were_preempted_is_nearly_as_measured() -> None:
    """The 90th percentile is a preempted request's, and who is preempted is a matter of blocks."""
    assert error("tpot p90") < 0.04


@pytest.mark.parametrize("statistic", ["mean", "p50", "p90", "p99"])
def test_the_whole_time_is_as_measured(statistic: str) -> None:
    assert error(f"e2e {statistic}") < 0.04


def test_each_ttft_before_the_pool_is_full_is_as_measured() -> None:
    """Thirty requests one by one, of 0.2 to 1.4 s."""
    timeline, real = both()
    rows = slice(NUM_WARMING_UP, NUM_WARMING_UP + 30)
    np.testing.assert_allclose(timeline.ttft_s[rows], real.ttft_s[rows], rtol=0.02, atol=0.005)
    assert timeline.ttft_s[rows].mean() == pytest.approx(real.ttft_s[rows].mean(), rel=0.01)


def test_a_pool_that_leaves_room_for_growth_preempts_half_as_often() -> None:
    timeline, _ = both()
    ours = replay(under_our_rules(RTX4090, layer_table(RTX4090)), timeline.requests)
    assert ours.num_preemptions < 0.6 * timeline.num_preemptions
    assert ours.tpot_s.mean() < timeline.tpot_s.mean()


def test_three_hundred_requests_take_less_than_a_second() -> None:
    requests, _ = measured(RTX4090)
    model = under_vllm_rules(RTX4090, layer_table(RTX4090))
    start_s = time.perf_counter()
    replay(model, requests)
    assert time.perf_counter() - start_s < 1


def vllm(kv_blocks: int, *, budget: int = 256, stamped: bool = False) -> Service:
    rules = MixedRules.VLLM_STAMPED if stamped else MixedRules.VLLM
    model = InstanceModel(Role.MIXED, MODEL, kv_blocks, LIMITS, budget, rules)
    return Service((model,))


@pytest.mark.parametrize("stamped", [False, True])
@pytest.mark.parametrize("rate", [1.0, 4.0, 30.0])
def test_skipping_steps_equals_taking_them(rate: float, stamped: bool) -> None:
    service, requests = vllm(400, stamped=stamped), chat(300, rate)
    skipped, stepped = simulate(service, requests), simulate(service, requests, max_skip=1)
    np.testing.assert_allclose(skipped.first_token_s, stepped.first_token_s, atol=1e-9)
    np.testing.assert_allclose(skipped.last_token_s, stepped.last_token_s, atol=1e-9)
    assert skipped.num_preemptions == stepped.num_preemptions


def test_everybody_is_served_where_the_pool_holds_little_more_than_one() -> None:
    timeline = simulate(vllm(130), chat(100, 30.0))
    assert timeline.num_preemptions > 10
    assert np.isfinite(timeline.last_token_s).all()


def two(second_s: float) -> Requests:
    """A long one that computes, then decodes; a second one arrives meanwhile."""
    return Requests(np.array([0.0, second_s]), np.array([200, 100]), np.array([50, 2]))


def first_steps_s() -> tuple[float, float, float]:
    """The first one's prompt, one decode of it, and a decode with the second one's prompt."""
    prompt_s = MODEL.prefill([Chunk(200)]).seconds
    decode_s = MODEL.decode(1, 201).seconds(201)
    return prompt_s, decode_s, MODEL.mixed([Chunk(100)], 1, 202).seconds


@pytest.mark.parametrize("share", [0.1, 0.9])
def test_an_arrival_misses_the_step_that_is_planned_already(share: float) -> None:
    prompt_s, decode_s, both_s = first_steps_s()
    timeline = simulate(vllm(400), two(share * prompt_s))
    assert timeline.first_token_s[1] == pytest.approx(prompt_s + decode_s + both_s)


def test_a_stamp_stands_for_the_nearest_boundary() -> None:
    """Within the first step: nearer to its begin it enters the next one, else the one after."""
    prompt_s, decode_s, both_s = first_steps_s()
    early, late = (
        simulate(vllm(400, stamped=True), two(share * prompt_s)).first_token_s[1]
        for share in (0.4, 0.6)
    )
    assert late == pytest.approx(prompt_s + decode_s + both_s)
    assert early < late - 0.9 * decode_s


def test_an_idle_engine_begins_at_once() -> None:
    prompt_s, *_ = first_steps_s()
    assert simulate(vllm(400), two(100.0)).first_token_s[1] - 100 < prompt_s


def test_a_prompt_enters_though_nothing_is_left_to_grow_into() -> None:
    """Nine blocks hold three prompts of three blocks each; ours keeps some for those within."""
    requests = Requests(np.zeros(3), np.full(3, 33), np.full(3, 8))
    ours = Service((InstanceModel(Role.MIXED, MODEL, 9, LIMITS, chunk_tokens=256),))
    kept, filled = simulate(ours, requests), simulate(vllm(9), requests)
    assert kept.prefill_start_s[2] >= kept.last_token_s[0]
    assert filled.prefill_start_s[2] == filled.prefill_start_s[1]


def test_a_prompt_put_out_half_way_finds_what_it_had_computed() -> None:
    """The decode beside it needs a block of the pool that it fills. By then 63 tokens of it were
    computed, three full blocks; the other 256 of its 304 take four chunks, not five."""
    requests = Requests(np.array([0.0, 0.001]), np.array([14, 304]), np.array([40, 1]))
    timeline = simulate(vllm(20, budget=64), requests)
    assert timeline.num_preemptions == 1
    again_s = timeline.first_token_s[1] - timeline.last_token_s[0]
    assert again_s == pytest.approx(4 * MODEL.prefill([Chunk(64)]).seconds)


class BlockQueue:
    """vLLM's queue of free blocks, block by block: what `PrefixMemory` must count alike."""

    def __init__(self, num_blocks: int) -> None:
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self.holds: dict[int, tuple[int, int]] = {}

    def take(self, owner: int, places: range) -> list[int]:
        blocks = [self.free.popitem(last=False)[0] for _ in places]
        for block, place in zip(blocks, places, strict=True):
            self.holds[block] = (owner, place)
        return blocks

    def give_back(self, blocks: list[int]) -> None:
        self.free.update(OrderedDict.fromkeys(reversed(blocks)))

    def find(self, owner: int, num_full: int) -> list[int]:
        there = {self.holds[b][1]: b for b in self.free if self.holds.get(b, (-1,))[0] == owner}
        found: list[int] = []
        while len(found) < num_full and len(found) in there:
            found.append(there[len(found)])
        for block in found:
            del self.free[block]
        return found


@pytest.mark.parametrize("seed", range(20))
def test_counting_finds_the_blocks_that_a_queue_of_blocks_keeps(seed: int) -> None:
    random = np.random.default_rng(seed)
    queue, memory = BlockQueue(200), PrefixMemory(200)
    held = {owner: queue.take(owner, range(20)) for owner in range(8)}
    gone: list[int] = []
    num_found = 0
    for _ in range(300):
        owner = int(random.integers(8))
        if owner in gone and len(queue.free) >= 20:
            count = memory.find(owner, len(queue.free))
            blocks = queue.find(owner, 19)
            assert count == len(blocks)
            num_found += count
            held[owner] = blocks + queue.take(owner, range(count, 20))
            gone.remove(owner)
        elif owner in held and random.random() < 0.3:
            queue.give_back(held.pop(owner))
            memory.freed(20)
            memory.leave(owner, 20, 19, len(queue.free))
            gone.append(owner)
        elif len(queue.free) > 3:  # somebody else grows and ends
            other = queue.take(100, range(3))
            queue.give_back(other)
            memory.freed(3)
    assert num_found > 0
