"""A workload: how long requests are and when they arrive, drawn for any rate and seed.

Lengths and unit-rate gaps depend on the seed alone, and the rate only scales the times (common
random numbers): attainment is then nearly monotone in the rate, and configurations are compared
on the same requests. The first n requests of a longer draw are those of a shorter one.
"""

import math
from dataclasses import dataclass

from planner.errors import WorkloadError
from planner.workload.arrivals import Arrivals
from planner.workload.lengths import Lengths
from planner.workload.requests import Requests


@dataclass(frozen=True)
class Workload:
    """What `parse_workload` makes of a name or a file.

    Args:
        name: as the user wrote it.
        source: where the lengths come from, in words.
        num_rows: requests in the trace behind it, where there is one.
    """

    name: str
    source: str
    lengths: Lengths
    arrivals: Arrivals
    num_rows: int | None = None

    @property
    def own_rate(self) -> float | None:
        """Requests per second of the trace that the arrivals come from; None without one."""
        return self.arrivals.own_rate

    def requests(self, num: int, rate: float | None = None, seed: int = 0) -> Requests:
        """The first `num` requests, at `rate` a second or, without it, at the trace's own."""
        if num < 1:
            raise WorkloadError(f"the number of requests must be at least 1, not {num}")
        stretch = self._stretch(rate)
        input_tokens, output_tokens = self.lengths.draw(num, seed)
        arrival_s = self.arrivals.times(num, seed)
        return Requests(arrival_s * stretch, input_tokens, output_tokens)

    def _stretch(self, rate: float | None) -> float:
        """What the arrivals' times are multiplied with."""
        if rate is None:
            if self.own_rate is None:
                raise WorkloadError(f"{self.name} has no rate of its own here: give one")
            return 1.0
        if not 0 < rate < math.inf:
            raise WorkloadError(f"the rate must be above zero requests a second, not {rate:g}")
        own_rate = self.own_rate or 1.0
        if own_rate == math.inf:
            raise WorkloadError(
                f"{self.name}: all requests arrive at once, so they cannot be stretched to a rate"
            )
        return own_rate / rate
