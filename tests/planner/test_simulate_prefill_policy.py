"""Skip-join in the simulator: the leaders' own order, in every kind of instance."""

import itertools
import random

import numpy as np
import pytest

from ipc.prefill_policy import BatchLimits
from ipc.vocabulary import PrefillPolicy, Role
from planner.errors import PlannerError
from planner.latency.interface import Chunk
from planner.simulate.arguments import read_plan
from planner.simulate.build import build
from planner.simulator.run import simulate
from planner.simulator.service import InstanceModel, Service
from planner.workload.requests import Requests
from tests.gpu_workers.rig import BLOCK_SIZE, Rig, prefill
from tests.gpu_workers.test_scheduler import prefilled
from tests.planner.line_model import LineModel, chat, instance

SHORT, LONG = 100, 1500
LIMITS = BatchLimits(512, 256, PrefillPolicy.SKIP_JOIN)
PIPELINE = LineModel(num_stages=2)
OPT = ("--model", "opt-13b", "--coefficients", "distserve-raw")


def skipping(
    role: Role, latency: LineModel | None = None, kv_blocks: int = 10_000
) -> InstanceModel:
    return instance(role, latency, kv_blocks=kv_blocks, limits=LIMITS)


SERVICES = {
    "1P+1D": Service((skipping(Role.PREFILL), instance(Role.DECODE))),
    "a small prefill pool": Service((skipping(Role.PREFILL, kv_blocks=140), instance(Role.DECODE))),
    "two stages": Service((skipping(Role.PREFILL, PIPELINE), instance(Role.DECODE))),
    "prefill first": Service((skipping(Role.MIXED, kv_blocks=400),)),
    "mixed in two stages": Service((skipping(Role.MIXED, PIPELINE, kv_blocks=400),)),
}


@pytest.mark.parametrize("name", SERVICES)
def test_a_request_goes_through_its_stages_in_order(name: str) -> None:
    timeline = simulate(SERVICES[name], chat(300, rate=4.0))
    assert (timeline.prefill_start_s >= timeline.requests.arrival_s).all()
    assert (timeline.prefill_end_s > timeline.prefill_start_s).all()
    assert (timeline.decode_start_s >= timeline.prefill_end_s).all()
    assert (timeline.last_token_s >= timeline.first_token_s).all()


@pytest.mark.parametrize("name", SERVICES)
def test_skipping_steps_equals_taking_them(name: str) -> None:
    requests = chat(200, rate=4.0)
    skipped = simulate(SERVICES[name], requests)
    stepped = simulate(SERVICES[name], requests, max_skip=1)
    for times in ("first_token_s", "last_token_s", "prefill_start_s", "prefill_end_s"):
        np.testing.assert_allclose(getattr(skipped, times), getattr(stepped, times), atol=1e-9)


@pytest.mark.parametrize("policy", PrefillPolicy)
@pytest.mark.parametrize("seed", range(5))
def test_prompts_end_in_the_order_in_which_a_leader_ends_them(
    policy: PrefillPolicy, seed: int
) -> None:
    """The first one begins alone, the others come during its step; by the real scheduler, step by
    step, and by the simulated clock."""
    sizes = random.Random(seed).choices(range(1, 90), k=60)
    rig = Rig(Role.PREFILL, num_blocks=2000, max_tokens=16, prefill_policy=policy)
    for index, size in enumerate(sizes):
        rig.tell(prefill(index, size))
        if index == 0:
            rig.step()
    ended = [event.request_id for event in prefilled(rig.run())]
    model = instance(Role.PREFILL, limits=BatchLimits(16, 16, policy))
    service = Service((model, instance(Role.DECODE)), block_size=BLOCK_SIZE)
    timeline = simulate(service, Requests(np.zeros(60), np.array(sizes), np.ones(60, int)))
    ends_s = timeline.prefill_end_s[ended]
    assert (np.diff(ends_s) >= 0).all()
    steps = rig.scheduler.counters.prefill_steps
    alone_s = LineModel().prefill([Chunk(sum(sizes))]).seconds
    assert ends_s[-1] == pytest.approx(alone_s + extra(steps))


def extra(num_steps: int) -> float:
    """What more steps than one cost: each has the constant term once."""
    return (num_steps - 1) * LineModel().prefill_s[0]


def test_a_short_prompt_waits_for_one_chunk_and_not_for_a_long_prompt() -> None:
    requests = Requests(np.array([0.0, 0.01]), np.array([LONG, SHORT]), np.ones(2, int))
    times = LineModel().prefill
    fcfs = Service((instance(Role.PREFILL), instance(Role.DECODE)))
    whole_s, chunk_s, short_s = (times([Chunk(n)]).seconds for n in (LONG, 512, SHORT))
    assert simulate(fcfs, requests).first_token_s.tolist() == pytest.approx(
        [whole_s, whole_s + short_s]
    )
    timeline = simulate(SERVICES["1P+1D"], requests)
    assert timeline.first_token_s[1] == pytest.approx(chunk_s + short_s)
    assert timeline.first_token_s[0] == pytest.approx(
        whole_s + 2 * times([Chunk(0)]).seconds + short_s
    )


def test_a_long_prompt_in_two_stages_shares_them_with_short_ones() -> None:
    requests = Requests(np.array([0.0, 0.01]), np.array([1024, SHORT]), np.ones(2, int))
    timeline = simulate(SERVICES["two stages"], requests)
    chunk_s, short_s = (PIPELINE.prefill([Chunk(n)]).seconds for n in (512, SHORT))
    assert timeline.first_token_s[1] == pytest.approx(2 * chunk_s + short_s)
    assert timeline.first_token_s[0] == pytest.approx(4 * chunk_s)


def test_under_a_mixed_load_short_prompts_gain_and_long_ones_lose_little() -> None:
    random_s = np.random.default_rng(1)
    sizes = np.where(random_s.random(800) < 0.2, 4000, SHORT)
    requests = Requests(np.cumsum(random_s.exponential(1 / 8, 800)), sizes, np.ones(800, int))
    fcfs, skip = (
        simulate(Service((instance(Role.PREFILL, limits=limits), instance(Role.DECODE))), requests)
        for limits in (BatchLimits(512, 256), LIMITS)
    )
    is_short = sizes == SHORT
    assert np.percentile(skip.ttft_s[is_short], 90) < 0.5 * np.percentile(fcfs.ttft_s[is_short], 90)
    assert np.median(skip.ttft_s[~is_short]) < 3 * np.median(fcfs.ttft_s[~is_short])


def test_the_option_reaches_every_instance_whose_steps_are_of_prompts_alone() -> None:
    words = (*OPT, "--prefill", "1", "--decode", "1", "--mixed", "1", "--chunk-tokens", "512")
    made = build(read_plan([*words, "--prefill-policy", "skip-join"]).deployment)
    policies = [model.limits.prefill_policy for _, model in made.groups]
    assert policies[0] is PrefillPolicy.SKIP_JOIN
    assert policies[2] is PrefillPolicy.FCFS


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--prefill-policy", "lifo"), "invalid .*lifo"),
        (
            ("--mixed", "1", "--chunk-tokens", "64", "--prefill-policy", "skip-join"),
            "--prefill-policy skip-join is for steps of prompts alone",
        ),
    ],
)
def test_what_cannot_be_is_refused(words: tuple[str, ...], why: str) -> None:
    with pytest.raises(PlannerError, match=why):
        read_plan([*OPT, *words])


def test_chunks_beside_decodes_have_an_order_of_their_own() -> None:
    with pytest.raises(PlannerError, match="first come, first served"):
        instance(Role.MIXED, limits=LIMITS, chunk_tokens=64)


def test_packed_short_prompts_share_a_step() -> None:
    requests = Requests(np.zeros(4), np.array([LONG, 200, 200, 200]), np.ones(4, int))
    ends = simulate(SERVICES["1P+1D"], requests).prefill_end_s
    pairs = itertools.pairwise(sorted(set(ends.tolist())))
    assert len(list(pairs)) == 2  # the first one begins alone, two together, the last, the long
