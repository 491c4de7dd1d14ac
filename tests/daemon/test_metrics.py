"""Counts and histograms, told what happens by a test."""

import itertools
from typing import Any

import pytest

from daemon.dealing import Deal
from daemon.errors import Draining, NotReady, QueueFull, QueueTimeout, ServeError, SloMissed
from daemon.generation import Delta, GenerationSpec, TokenStream
from daemon.instances import Instance
from daemon.metrics import Metrics
from daemon.request import Choice, Phase, Request
from daemon.slo import Targets
from ipc.messages import Pulled, Stats
from ipc.vocabulary import FinishReason, Role, SamplingParams
from tests.daemon.metric_samples import LAYOUT, all_samples, samples, spec_of, text_of

TARGETS = Targets(ttft_s=0.3, tpot_s=0.03)


def instance(name: str, role: Role, pp: int = 1) -> Instance:
    return Instance(spec_of(name, role, pp=pp), 1, LAYOUT, lambda _: None)


def answered(ttft_s: float, num_output: int, gap_s: float) -> Request:
    """A request that arrived at 100 s, and the moments of its life."""
    spec = GenerationSpec(prompt=(1, 2, 3), sampling=SamplingParams(max_tokens=50, seed=1))
    request = Request(spec, 1, TokenStream(1), 100.0)
    text: Any = None
    choice = Choice(0, text)
    choice.output, choice.finished = list(range(num_output)), FinishReason.LENGTH
    request.choices = [choice]
    first_s = 100.0 + ttft_s
    clock = request.clock
    clock.prefilled(100.0 + ttft_s / 2, first_s)
    clock.token(first_s)
    if num_output > 1:
        clock.pulled(first_s + 0.01, first_s + 0.02)
        clock.decoding(first_s + 0.03)
        clock.token(first_s + gap_s * (num_output - 1))
    clock.ended_s = clock.last_token_s
    return request


def finish(metrics: Metrics, *requests: Request) -> None:
    for request in requests:
        metrics.arrived(request)
        metrics.ended(request, Phase.FINISHED)


def test_running_are_those_in_decode_and_waiting_all_before() -> None:
    phases = {"waiting": 1, "prefill": 2, "handoff": 3, "decode": 5}
    metrics = Metrics("tiny")
    assert samples(metrics, "vllm:num_requests_running", phases) == {"tiny": 5}
    assert samples(metrics, "vllm:num_requests_waiting", phases) == {"tiny": 6}


def test_blocks_are_told_by_stage_and_a_dead_instance_holds_none() -> None:
    metrics = Metrics("tiny")
    decode = instance("decode-0", Role.DECODE, pp=2)
    metrics.instance_up(decode.spec, "torch")
    metrics.observed(decode, Stats(blocks_total=8, blocks_free=3, blocks_in_use=5))
    for stage in ("0", "1"):
        told = samples(metrics, "distserve_kv_blocks", stage=stage)
        assert told == {"free": 3, "held": 0, "in_use": 5}
    metrics.instance_down(decode.spec, "torch")
    assert samples(metrics, "distserve_kv_blocks", stage="1") == {"free": 0, "held": 0, "in_use": 0}
    assert set(samples(metrics, "distserve_instance_up").values()) == {0}


def test_the_way_by_which_blocks_are_pulled_is_told_and_changes_C14() -> None:
    metrics = Metrics("tiny")
    decode = instance("decode-0", Role.DECODE)
    metrics.observed(decode, Stats())
    assert samples(metrics, "distserve_kv_pull_path") == {}
    for path in ("peer", "host"):
        metrics.observed(decode, Stats(pull_path=path))
        decode.stats = Stats(pull_path=path)
    told = [s for s in all_samples(text_of(metrics)) if s.name == "distserve_kv_pull_path"]
    assert {s.labels["path"]: s.value for s in told} == {"peer": 0, "host": 1}


def test_an_instance_that_is_up_tells_its_shape() -> None:
    metrics = Metrics("tiny")
    metrics.instance_up(spec_of("decode-0", Role.DECODE, 2, 3), "torch")
    labels = 'instance="decode-0",kernels="torch",pp="3",role="decode",tp="2"'
    assert f"distserve_instance_up{{{labels}}} 1.0" in text_of(metrics)


def test_nothing_is_told_of_an_instance_that_was_removed() -> None:
    metrics = Metrics("tiny")
    for name in ("decode-0", "decode-1"):
        decode = instance(name, Role.DECODE)
        metrics.instance_up(decode.spec, "torch")
        metrics.observed(decode, Stats(blocks_total=8, blocks_free=8))
        metrics.got_on(name, 1.0)
    metrics.instance_removed("decode-1")
    gauges = [s for s in all_samples(text_of(metrics)) if s.labels.get("instance") == "decode-1"]
    assert {s.name for s in gauges if not s.name.endswith(("_total", "_created"))} == set()
    assert set(samples(metrics, "distserve_instance_up").values()) == {1}


def test_refusals_are_told_apart_by_their_reason_D11() -> None:
    metrics = Metrics("tiny")
    refusals: list[ServeError] = [
        QueueFull("full"),
        SloMissed("late"),
        QueueTimeout("waited"),
        NotReady("starting"),
        Draining(),
    ]
    for number, error in enumerate(refusals):
        for _ in range(number + 1):
            metrics.refused(error)
    assert samples(metrics, "distserve_requests_refused_total") == {
        "queue_full": 1,
        "slo": 2,
        "queue_timeout": 3,
        "not_ready": 4,
        "draining": 5,
    }


def test_the_loop_s_lag_is_counted_into_buckets() -> None:
    metrics = Metrics("tiny")
    for lag_s in (0.0, 0.004, 0.3):
        metrics.loop_lagged(lag_s)
    buckets = samples(metrics, "distserve_event_loop_lag_seconds_bucket")
    assert (buckets["0.0005"], buckets["0.005"], buckets["0.25"], buckets["+Inf"]) == (1, 2, 2, 3)


@pytest.mark.parametrize(
    ("name", "edge"),
    [
        ("vllm:time_to_first_token_seconds", "0.3"),
        ("vllm:request_time_per_output_token_seconds", "0.03"),
        ("vllm:inter_token_latency_seconds", "0.03"),
        ("vllm:time_per_output_token_seconds", "0.03"),
    ],
)
def test_a_target_is_an_edge_of_its_histograms(name: str, edge: str) -> None:
    def edges(metrics: Metrics) -> list[str]:
        found = [s for s in all_samples(text_of(metrics)) if s.name == f"{name}_bucket"]
        return [s.labels["le"] for s in found]

    own = edges(Metrics("tiny", TARGETS))
    assert edge in own
    assert sorted(own, key=float) == own
    assert len(set(own)) == len(own)
    without = edges(Metrics("tiny"))
    assert set(without) <= set(own)


def test_answers_are_judged_by_both_targets() -> None:
    metrics = Metrics("tiny", TARGETS, clock=lambda: 110.0)
    finish(metrics, answered(0.1, 11, 0.02), answered(0.1, 11, 0.05), answered(0.4, 11, 0.02))
    finish(metrics, answered(0.2, 1, 0.0))
    judged = {
        slo: samples(metrics, "distserve_slo_requests_total", slo=slo, met="true")[slo]
        for slo in ("ttft", "tpot", "both")
    }
    assert judged == {"ttft": 3, "tpot": 3, "both": 2}
    assert samples(metrics, "distserve_goodput_requests_total") == {"": 2}
    attainment = samples(metrics, "distserve_slo_attainment", slo="both")
    assert attainment == {"1m": 0.5, "5m": 0.5, "1h": 0.5}
    assert samples(metrics, "distserve_goodput_requests_per_second")["1m"] == 2 / 60
    assert samples(metrics, "distserve_slo_target_seconds") == {"ttft": 0.3, "tpot": 0.03}


def test_a_window_in_which_nothing_was_answered_tells_no_attainment() -> None:
    metrics = Metrics("tiny", TARGETS, clock=lambda: 110.0 + 200.0)
    finish(metrics, answered(0.1, 5, 0.02))
    assert set(samples(metrics, "distserve_slo_attainment", slo="both")) == {"5m", "1h"}


def test_vllm_s_phases_and_the_five_stages_add_up_to_the_request() -> None:
    metrics = Metrics("tiny")
    finish(metrics, answered(0.4, 11, 0.1))

    def total(name: str, **labels: str) -> float:
        return sum(samples(metrics, f"{name}_sum", **labels).values())

    end_to_end_s = total("vllm:e2e_request_latency_seconds")
    assert end_to_end_s == pytest.approx(1.4)
    assert total("distserve_stage_seconds") == pytest.approx(end_to_end_s)
    stages = samples(metrics, "distserve_stage_seconds_sum")
    assert stages == pytest.approx(
        {
            "prefill_queue": 0.2,
            "prefill": 0.2,
            "transfer": 0.01,
            "decode_queue": 0.02,
            "decode": 0.97,
        }
    )
    queue_s = total("vllm:request_queue_time_seconds")
    assert queue_s == pytest.approx(0.2)
    assert total("vllm:request_inference_time_seconds") == pytest.approx(1.2)
    assert total("vllm:request_prefill_time_seconds") == pytest.approx(0.2)
    assert total("vllm:request_decode_time_seconds") == pytest.approx(1.0)


def test_the_time_between_tokens_is_counted_once_for_each_token_after_the_first() -> None:
    metrics = Metrics("tiny")
    request = answered(0.1, 1, 0.0)
    (choice,) = request.choices
    for now_s, count in ((1.0, 1), (1.5, 1), (1.9, 4)):
        with Deal(metrics, now_s) as deal:
            deal.pass_on(request, choice, Delta(0, "", (1,) * count))
    for name in ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"):
        assert samples(metrics, f"{name}_count") == {"tiny": 5}
        assert samples(metrics, f"{name}_sum")["tiny"] == pytest.approx(0.9)
        buckets = samples(metrics, f"{name}_bucket")
        assert buckets == {"tiny": 5}  # the last edge, which all are below
    told = [s for s in all_samples(text_of(metrics)) if s.labels.get("le") in ("0.1", "0.5")]
    gaps = {s.labels["le"]: s.value for s in told if s.name.startswith("vllm:inter_token")}
    assert gaps == {"0.1": 4, "0.5": 5}


def test_a_prompt_that_a_decode_instance_computed_is_counted_A19() -> None:
    metrics = Metrics("tiny")
    for name, role in (("prefill-0", Role.PREFILL), ("decode-0", Role.DECODE)):
        one = instance(name, role)
        metrics.instance_up(one.spec, "torch")
        for steps in (1, 3):
            stats = Stats(prefill_steps=steps, prefill_tokens=100 * steps)
            if role is Role.DECODE and steps == 1:
                stats = Stats()
            metrics.observed(one, stats)
            one.stats = stats
        if role is Role.PREFILL:
            assert samples(metrics, "distserve_prefilled_on_decode_tokens_total") == {}
    assert samples(metrics, "distserve_prefilled_on_decode_tokens_total") == {"decode-0": 300}
    assert samples(metrics, "vllm:iteration_tokens_total_count") == {"tiny": 6}


def test_pulls_are_told_by_what_they_took_and_carried() -> None:
    metrics = Metrics("tiny")
    metrics.pulled(Pulled(1, 1 << 20, 5.0, 5.002))
    metrics.pulled(Pulled(2, 3 << 20, 6.0, 6.004))
    assert samples(metrics, "distserve_kv_transfer_bytes_sum") == {"": 4 << 20}
    assert samples(metrics, "distserve_kv_transfer_seconds_sum")[""] == pytest.approx(0.006)


def test_endings_are_told_by_how_and_add_up_D8() -> None:
    metrics = Metrics("tiny")
    finish(metrics, answered(0.1, 5, 0.01))
    for phase in (Phase.ABORTED, Phase.FAILED):
        request = answered(0.1, 2, 0.01)
        request.choices[0].finished = None
        metrics.arrived(request)
        metrics.ended(request, phase)
    metrics.arrived(answered(0.1, 5, 0.01))
    ended = samples(metrics, "distserve_requests_ended_total")
    assert ended == {"finished": 1, "aborted": 1, "failed": 1}
    assert samples(metrics, "distserve_requests_arrived_total") == {"": sum(ended.values()) + 1}
    reasons = {
        s.labels["finished_reason"]: s.value
        for s in all_samples(text_of(metrics))
        if s.name == "vllm:request_success_total"
    }
    assert reasons == {"stop": 0, "length": 1, "abort": 1, "error": 1}


def test_every_metric_of_vllm_bears_its_labels() -> None:
    metrics = Metrics("tiny", TARGETS)
    finish(metrics, answered(0.1, 5, 0.01))
    ours = [s for s in all_samples(text_of(metrics)) if s.name.startswith("vllm:")]
    assert ours
    assert {(s.labels["model_name"], s.labels["engine"]) for s in ours} == {("tiny", "0")}


def test_each_kind_of_refusal_has_one_word_of_our_own_D7() -> None:
    def kinds(kind: type[ServeError]) -> list[type[ServeError]]:
        inner = kind.__subclasses__()
        return [*inner, *itertools.chain.from_iterable(map(kinds, inner))]

    words = [kind.code or kind.kind for kind in kinds(ServeError)]
    assert all(word.replace("_", "").isalpha() and len(word) < 40 for word in words)
