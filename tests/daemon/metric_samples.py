"""What /metrics says, read back with the official parser."""

from collections.abc import Iterator, Mapping

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from daemon.metrics import Metrics
from ipc.kv_layout import RankLayout, Span
from ipc.vocabulary import DType, InstanceSpec, Parallelism, Role

LAYOUT = RankLayout(Span(0, 1), Span(0, 1), 8, 4, 1, DType.FP32)


def spec_of(name: str, role: Role, tp: int = 1, pp: int = 1) -> InstanceSpec:
    return InstanceSpec(name, role, Parallelism(tp, pp), ())


def all_samples(text: str) -> Iterator[Sample]:
    for family in text_string_to_metric_families(text):
        yield from family.samples


def text_of(metrics: Metrics, phases: Mapping[str, int] | None = None) -> str:
    return metrics.render(phases or {})[1].decode()


def samples(
    metrics: Metrics, name: str, phases: Mapping[str, int] | None = None, **labels: str
) -> dict[str, float]:
    """Values of a metric's samples that bear these labels, by the last of their labels, in the
    order of the alphabet."""
    return {
        sorted(sample.labels.items())[-1][1] if sample.labels else "": sample.value
        for sample in all_samples(text_of(metrics, phases))
        if sample.name == name and labels.items() <= sample.labels.items()
    }
