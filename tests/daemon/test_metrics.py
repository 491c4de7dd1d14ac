"""What /metrics says, read back with the official parser."""

from prometheus_client.parser import text_string_to_metric_families

from daemon.errors import Draining, NotReady, QueueFull, QueueTimeout, ServeError, SloMissed
from daemon.metrics import Metrics
from ipc.messages import Stats
from ipc.vocabulary import InstanceSpec, Parallelism, Role


def samples(metrics: Metrics, name: str, phases: dict[str, int] | None = None) -> dict[str, float]:
    """Values of a family's samples by their last label (the model's name left out)."""
    text = metrics.render(phases or {})[1].decode()
    return {
        list(sample.labels.values())[-1]: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name
    }


def test_running_are_those_in_decode_and_waiting_all_before() -> None:
    phases = {"waiting": 1, "prefill": 2, "handoff": 3, "decode": 5}
    metrics = Metrics("tiny")
    assert samples(metrics, "vllm:num_requests_running", phases) == {"tiny": 5}
    assert samples(metrics, "vllm:num_requests_waiting", phases) == {"tiny": 6}


def test_a_dead_instance_holds_no_blocks() -> None:
    metrics = Metrics("tiny")
    spec = InstanceSpec("decode-0", Role.DECODE, Parallelism(2, 3), ())
    metrics.instance_up(spec, "torch")
    metrics.observed("decode-0", Stats(blocks_total=8, blocks_free=3, blocks_in_use=5))
    assert samples(metrics, "distserve_kv_blocks") == {"free": 3, "held": 0, "in_use": 5}
    metrics.instance_down(spec, "torch")
    assert samples(metrics, "distserve_kv_blocks") == {"free": 0, "held": 0, "in_use": 0}
    assert set(samples(metrics, "distserve_instance_up").values()) == {0}


def test_an_instance_that_is_up_tells_its_shape() -> None:
    metrics = Metrics("tiny")
    metrics.instance_up(InstanceSpec("decode-0", Role.DECODE, Parallelism(2, 3), ()), "torch")
    text = metrics.render({})[1].decode()
    labels = 'instance="decode-0",kernels="torch",pp="3",role="decode",tp="2"'
    assert f"distserve_instance_up{{{labels}}} 1.0" in text


def test_refusals_are_told_apart_by_their_reason() -> None:
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
