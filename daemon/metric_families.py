"""How metrics are made here: in a registry of our own, vLLM's ones with vLLM's labels.

A registry of our own, so that tests and several daemons in one process do not share counts. vLLM
tells its engines apart by number; here all instances together are the one engine 0, and what
belongs to an instance is told under names of our own.
"""

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from daemon.quick_histogram import QuickHistogram

ENGINE = "0"


class Families:
    """Makes metrics and keeps them in `registry`."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self.model_labels = {"model_name": model_name, "engine": ENGINE}

    def counter(self, name: str, text: str, labels: Sequence[str] = ()) -> Counter:
        return Counter(name, text, labels, registry=self.registry)

    def gauge(self, name: str, text: str, labels: Sequence[str] = ()) -> Gauge:
        return Gauge(name, text, labels, registry=self.registry)

    def histogram(
        self, name: str, text: str, edges: Sequence[float], labels: Sequence[str] = ()
    ) -> Histogram:
        return Histogram(name, text, labels, buckets=edges, registry=self.registry)

    def model_counter(self, name: str, text: str) -> Counter:
        return self.counter(name, text, list(self.model_labels)).labels(**self.model_labels)

    def model_gauge(self, name: str, text: str) -> Gauge:
        return self.gauge(name, text, list(self.model_labels)).labels(**self.model_labels)

    def model_histogram(self, name: str, text: str, edges: Sequence[float]) -> Histogram:
        family = self.histogram(name, text, edges, list(self.model_labels))
        return family.labels(**self.model_labels)

    def quick_histogram(
        self, names: tuple[str, ...], text: str, edges: tuple[float, ...]
    ) -> QuickHistogram:
        histogram = QuickHistogram(names, text, self.model_labels, edges)
        self.registry.register(histogram)
        return histogram
