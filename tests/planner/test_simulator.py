"""The simulator against queueing theory, against its own step-by-step run, and by hand."""

import itertools

import numpy as np
import pytest

from ipc.prefill_policy import BatchLimits
from ipc.vocabulary import Role
from planner.errors import PlannerError, WorkloadError
from planner.latency.interface import Chunk, Slowest
from planner.simulator.chunks import chunk_sizes
from planner.simulator.run import simulate
from planner.simulator.service import Overheads, Service, Speculation
from planner.simulator.timeline import Timeline
from planner.slo import Slo
from planner.workload.requests import Requests
from tests.planner.line_model import LineModel, chat, constant, instance

TIMES = (
    "first_token_s",
    "last_token_s",
    "prefill_start_s",
    "prefill_end_s",
    "pull_start_s",
    "pull_end_s",
    "decode_start_s",
)
ROOMY = instance(Role.DECODE)
TIGHT = instance(Role.DECODE, kv_blocks=300)
PIPELINE = LineModel(num_stages=2)
UNEVEN = LineModel(num_stages=2, slowest=Slowest(prefill=1.3, decode=1.4))
KINKED = LineModel(until=1000.0)

SERVICES = {
    "1P+1D": Service((instance(Role.PREFILL), ROOMY)),
    "a decode pool that preempts": Service((instance(Role.PREFILL), TIGHT)),
    "copies by the decode leader": Service(
        (instance(Role.PREFILL), TIGHT), pull_stalls_decode=True
    ),
    "overheads": Service(
        (instance(Role.PREFILL), ROOMY),
        overheads=Overheads(0.002, 0.001, 0.0005, 0.0003, 0.0004, 1e-5),
    ),
    "2P+2D over one link": Service(
        (instance(Role.PREFILL), instance(Role.PREFILL), TIGHT, TIGHT), shares_link=True
    ),
    "two stages each": Service(
        (instance(Role.PREFILL, PIPELINE), instance(Role.DECODE, PIPELINE, kv_blocks=300))
    ),
    "two stages that differ": Service(
        (instance(Role.PREFILL, UNEVEN), instance(Role.DECODE, UNEVEN, kv_blocks=300))
    ),
    "lines that end": Service(
        (instance(Role.PREFILL, KINKED), instance(Role.DECODE, KINKED, kv_blocks=300))
    ),
    "prefill first": Service((instance(Role.MIXED, kv_blocks=400),)),
    "chunked": Service((instance(Role.MIXED, kv_blocks=400, chunk_tokens=256),)),
    "mixed in two stages": Service((instance(Role.MIXED, PIPELINE, kv_blocks=400),)),
    "mixed in two that differ": Service((instance(Role.MIXED, UNEVEN, kv_blocks=400),)),
    "planned ahead": Service(
        (instance(Role.PREFILL, plans_ahead=True), instance(Role.DECODE, plans_ahead=True))
    ),
    "prefill first, planned ahead": Service(
        (instance(Role.MIXED, kv_blocks=400, plans_ahead=True),)
    ),
    "chunked, planned ahead": Service(
        (instance(Role.MIXED, kv_blocks=400, chunk_tokens=256, plans_ahead=True),)
    ),
    "a mixed one that pulls": Service(
        (instance(Role.PREFILL), instance(Role.MIXED, kv_blocks=400, chunk_tokens=256))
    ),
    "a mixed one that pulls in two stages": Service(
        (instance(Role.PREFILL), instance(Role.MIXED, UNEVEN, kv_blocks=400, chunk_tokens=256))
    ),
    "all together": Service(
        (instance(Role.PREFILL), TIGHT, instance(Role.MIXED, kv_blocks=400, chunk_tokens=256))
    ),
}


@pytest.mark.parametrize("name", SERVICES)
def test_skipping_steps_equals_taking_them(name: str) -> None:
    requests = chat(300, rate=4.0)
    skipped = simulate(SERVICES[name], requests)
    stepped = simulate(SERVICES[name], requests, max_skip=1)
    for times in TIMES:
        np.testing.assert_allclose(getattr(skipped, times), getattr(stepped, times), atol=1e-9)
    assert skipped.num_preemptions == stepped.num_preemptions


def test_the_tight_pool_does_preempt() -> None:
    assert simulate(SERVICES["a decode pool that preempts"], chat(300, 4.0)).num_preemptions > 5


@pytest.mark.parametrize("name", SERVICES)
def test_a_request_goes_through_its_stages_in_order(name: str) -> None:
    timeline = simulate(SERVICES[name], chat(200, rate=4.0))
    arrival_s = timeline.requests.arrival_s
    in_order = [arrival_s, *(getattr(timeline, times) for times in TIMES[2:])]
    for earlier, later in itertools.pairwise(in_order):
        assert (later >= earlier - 1e-12).all()
    assert (timeline.last_token_s >= timeline.decode_start_s).all()
    total_s = sum(timeline.stages_s().values())
    np.testing.assert_allclose(total_s, timeline.last_token_s - arrival_s, atol=1e-9)


def lindley_s(requests: Requests, service_s: float) -> float:
    """Mean time in a first-come, first-served queue of constant service (Lindley's recursion)."""
    offsets = service_s * np.arange(len(requests))
    starts = np.maximum.accumulate(requests.arrival_s - offsets) + offsets
    return float((starts - requests.arrival_s).mean()) + service_s


@pytest.mark.parametrize("rho", [0.1, 0.3, 0.5, 0.7, 0.9])
def test_prefill_waits_as_an_md1_queue(rho: float) -> None:
    """Paper equation 1: D + R D^2 / (2 (1 - R D)), for prompts of one length, one at a time.

    The simulator equals the recursion on the same arrivals to the last digit; the recursion on
    ten million arrivals is within 1 % of the equation.
    """
    service_s, rate = 0.1, rho / 0.1
    prompt = instance(
        Role.PREFILL,
        LineModel(prefill_s=(service_s, 0.0)),
        kv_blocks=1 << 40,
        limits=BatchLimits(prefill_tokens=1, max_batch=256),
    )
    requests = constant(20_000, rate, tokens=(512, 1), seed=3)
    mean_s = simulate(Service((prompt, ROOMY)), requests).ttft_s.mean()
    assert mean_s == pytest.approx(lindley_s(requests, service_s), rel=1e-9)
    exact_s = service_s + rate * service_s**2 / (2 * (1 - rho))
    many = constant(10_000_000, rate, tokens=(512, 1), seed=4)
    assert lindley_s(many, service_s) == pytest.approx(exact_s, rel=0.01)


def test_as_many_are_inside_as_littles_law_says() -> None:
    """Mean number in decode = rate * mean time there, counted at instants of their own."""
    timeline = simulate(SERVICES["1P+1D"], chat(3000, rate=4.0))
    inside_s = timeline.last_token_s - timeline.prefill_end_s
    instants = np.linspace(100, timeline.requests.arrival_s[-1], 20_000)
    entered = np.searchsorted(np.sort(timeline.prefill_end_s), instants)
    left = np.searchsorted(np.sort(timeline.last_token_s), instants)
    counted = (timeline.prefill_end_s > 100) & (timeline.prefill_end_s < instants[-1])
    rate = counted.sum() / (instants[-1] - 100)
    assert (entered - left).mean() == pytest.approx(rate * inside_s[counted].mean(), rel=0.02)


def test_no_device_computes_more_than_one_thing_at_a_time() -> None:
    requests = chat(300, rate=8.0)
    timeline = simulate(SERVICES["1P+1D"], requests)
    busy = sorted(
        {(s, e) for s, e in zip(timeline.prefill_start_s, timeline.prefill_end_s, strict=True)}
    )
    assert all(later[0] >= earlier[1] - 1e-12 for earlier, later in itertools.pairwise(busy))


def test_short_prompts_are_packed_up_to_l_m() -> None:
    requests = Requests(np.array([0.0, 0.001, 0.002, 0.003]), np.full(4, 200), np.ones(4, int))
    timeline = simulate(SERVICES["1P+1D"], requests)
    assert len(set(timeline.prefill_end_s)) == 3  # one alone, two together, one alone


def test_a_second_batch_enters_the_pipeline_when_the_first_stage_is_free() -> None:
    requests = Requests(np.zeros(3), np.full(3, 512), np.ones(3, int))
    timeline = simulate(SERVICES["two stages each"], requests)
    stage_s = PIPELINE.prefill([Chunk(512)]).seconds
    np.testing.assert_allclose(timeline.prefill_end_s, [2 * stage_s, 3 * stage_s, 4 * stage_s])


def test_batches_leave_a_pipeline_at_the_distance_of_its_slowest_stage() -> None:
    requests = Requests(np.zeros(3), np.full(3, 512), np.ones(3, int))
    ends_s = simulate(SERVICES["two stages that differ"], requests).prefill_end_s
    stage_s = UNEVEN.prefill([Chunk(512)]).seconds
    np.testing.assert_allclose(ends_s, [2 * stage_s, 3.3 * stage_s, 4.6 * stage_s])


def test_micro_batches_take_turns_at_the_slowest_stage_and_one_alone_does_not_wait() -> None:
    decode = Service((instance(Role.PREFILL, LineModel((0.0, 0.0))), instance(Role.DECODE, UNEVEN)))
    alone, both = (
        simulate(decode, Requests(np.zeros(count), np.full(count, 64), np.full(count, 200)))
        for count in (1, 2)
    )
    np.testing.assert_allclose(both.tpot_s, 1.4 * alone.tpot_s[0], rtol=0.02)


def test_unpulled_prompts_hold_prefill_back() -> None:
    """Prefill memory is the buffer: what decode cannot take stays, and nothing new starts."""
    prefill = instance(Role.PREFILL, kv_blocks=80)
    decode = instance(Role.DECODE, kv_blocks=40)
    requests = constant(20, 100.0, tokens=(480, 100))
    timeline = simulate(Service((prefill, decode)), requests)
    held = [
        ((timeline.prefill_start_s <= t) & (timeline.pull_end_s > t)).sum()
        for t in timeline.prefill_start_s
    ]
    assert max(held) == 2  # 80 blocks hold two prompts of 30
    assert timeline.ttft_s[-1] > 19 * 100 * 0.02 / 2


def test_a_faster_link_in_the_limit_is_no_link_at_all() -> None:
    requests = chat(300, rate=4.0)
    free = LineModel(transfer_s=(0.0, 0.0))
    fast = LineModel(transfer_s=(0.0, 1e-12))
    timelines = [
        simulate(Service((instance(Role.PREFILL, m), instance(Role.DECODE, m))), requests)
        for m in (free, fast)
    ]
    np.testing.assert_allclose(timelines[0].last_token_s, timelines[1].last_token_s, atol=1e-6)


def test_pulls_over_one_link_take_turns() -> None:
    timeline = simulate(SERVICES["2P+2D over one link"], chat(200, rate=8.0))
    order = np.argsort(timeline.pull_start_s)
    pulled = order[timeline.pull_end_s[order] > timeline.pull_start_s[order]]
    starts, ends = timeline.pull_start_s[pulled], timeline.pull_end_s[pulled]
    assert len(pulled) > 100
    assert (starts[1:] >= ends[:-1] - 1e-12).all()


def test_a_pull_for_an_empty_batch_is_waited_for_once() -> None:
    """A bug: a copy made as the last sequence left also lengthened the newcomer's first step."""
    model = LineModel(prefill_s=(0.015, 0.0), decode_s=(0.02, 0.0, 0.0), transfer_s=(0.01, 0.0))
    service = Service(
        (instance(Role.PREFILL, model), instance(Role.DECODE, model)), pull_stalls_decode=True
    )
    requests = Requests(np.array([0.0, 0.02]), np.array([16, 16]), np.array([2, 3]))
    timeline = simulate(service, requests)
    assert timeline.last_token_s[0] == pytest.approx(0.045)  # while the second one waits
    assert timeline.decode_start_s[1] == pytest.approx(0.055)
    assert timeline.last_token_s[1] == pytest.approx(0.095)


def test_a_single_token_never_goes_to_decode() -> None:
    timeline = simulate(SERVICES["1P+1D"], constant(50, 4.0, tokens=(100, 1)))
    assert (timeline.last_token_s == timeline.first_token_s).all()
    assert (timeline.tpot_s == 0).all()


def test_decode_steps_wait_for_whole_prompts_in_prefill_first() -> None:
    alone = Requests(np.array([0.0]), np.array([100]), np.array([101]))
    disturbed = Requests(np.array([0.0, 1.0]), np.array([100, 1400]), np.array([101, 1]))
    service = SERVICES["prefill first"]
    longer_s = (
        simulate(service, disturbed).last_token_s[0] - simulate(service, alone).last_token_s[0]
    )
    assert longer_s == pytest.approx(LineModel().prefill([Chunk(1400)]).seconds)


def test_speculation_draws_as_many_tokens_as_the_formula_says() -> None:
    """(1 - a^(g+1)) / (1 - a) tokens a step, arXiv 2211.17192 equation 1."""
    service = Service(
        (instance(Role.PREFILL), instance(Role.DECODE, LineModel(decode_s=(0.02, 0.0, 0.0)))),
        speculation=Speculation(num_drafted=3, acceptance=0.7),
    )
    timeline = simulate(service, constant(200, 2.0, tokens=(100, 401)))
    steps = (timeline.last_token_s - timeline.decode_start_s) / 0.02
    assert (400 / steps).mean() == pytest.approx((1 - 0.7**4) / (1 - 0.7), rel=0.02)
    again = simulate(service, constant(200, 2.0, tokens=(100, 401)))
    assert (again.last_token_s == timeline.last_token_s).all()
    other = simulate(service, constant(200, 2.0, tokens=(100, 401)), seed=1)
    assert (other.last_token_s != timeline.last_token_s).any()


def attained(timeline: Timeline, slo: Slo) -> float:
    return float(timeline.meets(slo).mean())


def test_attainment_falls_with_the_rate_and_rises_with_scale_and_devices() -> None:
    slo = Slo(ttft_s=0.2, tpot_s=0.03)
    requests = chat(2000, rate=1.0)
    one = SERVICES["1P+1D"]
    two = Service((*one.instances, *one.instances))
    by_rate = [attained(simulate(one, requests.stretched(1 / r)), slo) for r in (2, 4, 6, 8, 12)]
    assert by_rate == sorted(by_rate, reverse=True)
    assert by_rate[0] > 0.9 > by_rate[-1]
    timeline = simulate(one, requests.stretched(1 / 6))
    by_scale = [attained(timeline, slo.scaled(s)) for s in (0.5, 0.75, 1, 1.5, 2)]
    assert by_scale == sorted(by_scale)
    assert attained(simulate(two, requests.stretched(1 / 8)), slo) > by_rate[3]


def test_a_service_without_both_phases_is_refused() -> None:
    with pytest.raises(PlannerError, match="nobody decodes"):
        Service((instance(Role.PREFILL),))
    with pytest.raises(PlannerError, match="nobody prefills"):
        Service((ROOMY,))


def test_a_request_that_fits_no_pool_is_refused() -> None:
    with pytest.raises(WorkloadError, match=r"1100 tokens does not fit: .* holds 640"):
        simulate(
            Service((instance(Role.PREFILL), instance(Role.DECODE, kv_blocks=40))),
            constant(5, 1.0, tokens=(1000, 100)),
        )


def test_what_a_prefill_instance_has_done_goes_to_mixed_ones_too() -> None:
    """A bug: only instances that do nothing but decode were asked, and there may be none."""
    timeline = simulate(SERVICES["a mixed one that pulls"], chat(200, rate=4.0))
    is_pulled = timeline.pull_end_s > timeline.pull_start_s
    assert 0.3 < is_pulled.mean() < 0.9  # the others were prefilled where they decode
    both = Service((instance(Role.PREFILL), instance(Role.DECODE), instance(Role.MIXED)))
    timeline = simulate(both, chat(200, rate=4.0))
    assert (timeline.pull_end_s > timeline.pull_start_s).any()
    assert not np.isnan(timeline.last_token_s).any()


def test_colocated_instances_share_the_decodes() -> None:
    """A bug: empty prefill queues are equal, and the first instance was given every request."""
    requests = chat(400, rate=8.0)
    four = Service(tuple(instance(Role.MIXED) for _ in range(4)))
    alone = Service((instance(Role.MIXED),))
    ours = simulate(four, requests).tpot_s.mean()
    assert ours < 1.1 * simulate(alone, requests.stretched(4)).tpot_s.mean()


@pytest.mark.parametrize(
    ("remaining", "budget", "sizes"),
    [([100], 64, [64]), ([10, 100], 64, [10, 54]), ([64, 5], 64, [64]), ([5], 0, []), ([], 64, [])],
)
def test_chunks_fill_the_budget_in_order(
    remaining: list[int], budget: int, sizes: list[int]
) -> None:
    assert chunk_sizes(remaining, budget=budget) == sizes
