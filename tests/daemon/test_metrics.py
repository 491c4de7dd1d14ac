"""What /metrics says, read back with the official parser."""

from prometheus_client.parser import text_string_to_metric_families

from daemon.metrics import Metrics
from ipc.messages import Stats


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
    metrics.instance_up("decode-0", "decode", "torch")
    metrics.observed("decode-0", Stats(blocks_total=8, blocks_free=3, blocks_in_use=5))
    assert samples(metrics, "distserve_kv_blocks") == {"free": 3, "held": 0, "in_use": 5}
    metrics.instance_down("decode-0", "decode", "torch")
    assert samples(metrics, "distserve_kv_blocks") == {"free": 0, "held": 0, "in_use": 0}
    assert set(samples(metrics, "distserve_instance_up").values()) == {0}
