"""A histogram for what happens with every token: two additions and a search in a short list.

The client library's own takes a lock and walks its buckets; at some ten thousand tokens a second
that would be felt. Only the event loop observes, so no lock is needed.
"""

from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector


class QuickHistogram(Collector):
    """One series of each name; an older name may be an alias of a newer one."""

    def __init__(
        self, names: tuple[str, ...], text: str, labels: dict[str, str], edges: tuple[float, ...]
    ) -> None:
        self._names = names
        self._text = text
        self._labels = labels
        self._edges = edges
        self._counts = [0] * (len(edges) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._edges, value)] += times
        self._sum += value * times

    def collect(self) -> Iterator[HistogramMetricFamily]:
        edges = [*map(str, map(float, self._edges)), "+Inf"]
        buckets = list(zip(edges, map(float, accumulate(self._counts)), strict=True))
        for name in self._names:
            family = HistogramMetricFamily(name, self._text, labels=list(self._labels))
            family.add_metric(list(self._labels.values()), buckets, self._sum)
            yield family
