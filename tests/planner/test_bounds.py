"""Floors and caps against a linear engine, and against the figures known of OPT-13B."""

import csv
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from planner.bounds import (
    Limit,
    Pool,
    decode_rate_cap,
    mean_context,
    prefill_rate_cap,
    tpot_floor_s,
    ttft_floor_s,
)
from planner.latency.interface import EQUAL, Chunk, Estimate, Slowest, Source, StepLine
from planner.slo import Slo
from planner.workload.requests import Requests

SHAREGPT = Path(__file__).parents[3] / "shared" / "data" / "sharegpt_distserve.csv"
COLUMNS = ("input_tokens", "output_tokens")


class LinearEngine:
    """OPT-13B on one A100 by the published coefficients; `num_stages` equal stages."""

    source = Source.FITTED

    def __init__(self, num_stages: int = 1, slowest: Slowest = EQUAL) -> None:
        self.num_stages = num_stages
        self.slowest = slowest
        self.num_devices = num_stages

    def prefill(self, chunks: Sequence[Chunk]) -> Estimate:
        num_tokens = sum(chunk.num_new for chunk in chunks)
        squares = sum(chunk.num_new**2 for chunk in chunks)
        ms = 18.1025 + 0.101912 * num_tokens + 7.12226e-6 * squares
        return Estimate(ms / 1000 / self.num_stages, self.source)

    def decode(self, batch: int, context_tokens: float) -> StepLine:
        base_s = (19.9347 + 0.038507 * batch) / 1000 / self.num_stages
        return StepLine(base_s, 6.26936e-7 / self.num_stages, math.inf, self.source)

    def mixed(self, chunks: Sequence[Chunk], batch: int, context_tokens: float) -> Estimate:
        raise NotImplementedError("no bound asks for it")

    def transfer(self, num_tokens: int) -> Estimate:
        raise NotImplementedError("no bound asks for it")


def equal(num_input: int, num_output: int, count: int = 10) -> Requests:
    ones = np.ones(count, dtype=np.int64)
    return Requests(np.arange(count, dtype=np.float64), num_input * ones, num_output * ones)


def test_the_ttft_floor_is_the_prefill_of_the_prompt_at_the_target() -> None:
    lengths = np.arange(1, 101, dtype=np.int64)
    requests = Requests(np.arange(100.0), lengths, lengths)
    floor_s = ttft_floor_s(LinearEngine(), requests, 0.9)
    assert floor_s == LinearEngine().prefill([Chunk(91)]).seconds


def test_stages_do_not_lower_the_floors_of_one_request() -> None:
    requests = equal(512, 100)
    for num_stages in (2, 4):
        staged, single = LinearEngine(num_stages), LinearEngine()
        assert ttft_floor_s(staged, requests, 0.9) == pytest.approx(
            ttft_floor_s(single, requests, 0.9)
        )
        assert tpot_floor_s(staged, requests, 0.9) == pytest.approx(
            tpot_floor_s(single, requests, 0.9)
        )


def test_the_slowest_stage_bounds_the_rates_but_not_one_request() -> None:
    requests, pool = equal(512, 100), Pool(100_000, 64)
    even, uneven = LinearEngine(2), LinearEngine(2, Slowest(prefill=1.3, decode=1.4))
    for floor_s in (ttft_floor_s, tpot_floor_s):
        assert floor_s(uneven, requests, 0.9) == floor_s(even, requests, 0.9)
    prefills = [prefill_rate_cap(engine, requests, 512) for engine in (even, uneven)]
    assert prefills[0] == pytest.approx(1.3 * prefills[1])
    decodes = [decode_rate_cap(engine, requests, pool).rate for engine in (even, uneven)]
    assert decodes[0] == pytest.approx(1.4 * decodes[1])


def test_the_tpot_floor_is_a_step_alone_and_speculation_lowers_it() -> None:
    floor_s = tpot_floor_s(LinearEngine(), equal(512, 100), 0.9)
    assert floor_s == pytest.approx((19.9347 + 0.038507 + 6.26936e-4 * 562) / 1000)
    assert tpot_floor_s(LinearEngine(), equal(512, 100), 0.9, 2.0) == floor_s / 2


def test_answers_of_one_token_have_no_tpot() -> None:
    assert tpot_floor_s(LinearEngine(), equal(512, 1), 0.9) == 0.0
    assert decode_rate_cap(LinearEngine(), equal(512, 1), Pool(10_000, 64)).rate == math.inf


def test_a_long_prompt_caps_the_prefill_rate_alone() -> None:
    cap = prefill_rate_cap(LinearEngine(), equal(512, 100), saturation_tokens=512)
    assert cap == pytest.approx(1 / LinearEngine().prefill([Chunk(512)]).seconds)


def test_short_prompts_share_a_prefill_step() -> None:
    alone = prefill_rate_cap(LinearEngine(), equal(64, 100), saturation_tokens=64)
    packed = prefill_rate_cap(LinearEngine(), equal(64, 100), saturation_tokens=512)
    assert packed == pytest.approx(8 / LinearEngine().prefill([Chunk(64)] * 8).seconds)
    assert packed > 2 * alone


def test_stages_multiply_the_prefill_rate() -> None:
    caps = [prefill_rate_cap(LinearEngine(n), equal(512, 100), 512) for n in (1, 2, 4)]
    assert caps[1:] == pytest.approx([2 * caps[0], 4 * caps[0]])


@pytest.mark.parametrize(
    ("pool", "tpot_s", "limit"),
    [
        (Pool(66_144, 1_000), 1.0, Limit.KV),
        (Pool(10_000_000, 64), 1.0, Limit.ENGINE),
        (Pool(10_000_000, 1_000), 0.05, Limit.SLO),
    ],
)
def test_the_smallest_of_three_batches_limits_decode(
    pool: Pool, tpot_s: float, limit: Limit
) -> None:
    requests = equal(800, 201)
    cap = decode_rate_cap(LinearEngine(), requests, pool, Slo(1, tpot_s))
    context = 800 + 201 / 2
    step_s = LinearEngine().decode(cap.batch, 0).seconds(cap.batch * context)
    assert cap.limit is limit
    assert cap.rate == pytest.approx(cap.batch / (200 * step_s))
    if limit is Limit.SLO:
        over_s = LinearEngine().decode(cap.batch + 1, 0).seconds((cap.batch + 1) * context)
        assert step_s <= tpot_s < over_s


def test_a_tpot_target_below_a_lone_step_leaves_no_rate() -> None:
    cap = decode_rate_cap(LinearEngine(), equal(800, 200), Pool(66_144, 64), Slo(1, 0.01))
    assert (cap.rate, cap.batch, cap.limit) == (0.0, 0, Limit.SLO)


def test_long_answers_weigh_more_in_the_mean_context() -> None:
    requests = Requests(np.array([0.0, 1.0]), np.array([100, 1_000]), np.array([1, 101]))
    assert mean_context(requests) == 1_050.5


@pytest.mark.skipif(not SHAREGPT.exists(), reason="the raw ShareGPT lengths are not here")
def test_opt_13b_on_sharegpt_is_capped_where_its_memory_caps_it() -> None:
    with SHAREGPT.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    columns = [np.array([int(row[name]) for row in rows]) for name in COLUMNS]
    requests = Requests(np.arange(len(rows), dtype=np.float64), *columns)
    cap = decode_rate_cap(LinearEngine(), requests, Pool(66_144, 1_000), Slo(0.2, 0.1))
    assert mean_context(requests) == pytest.approx(928, rel=0.01)
    assert cap.limit is Limit.KV
    assert cap.rate / 3 == pytest.approx(1.84, rel=0.02)  # per GPU of 2 for prefill, 1 for decode
