"""When replanning fires, how it forecasts and what a switch costs: all parameters, with units.

The paper replans on "a significant pattern shift" of average lengths and arrival rate, from recent
history, and takes reloading weights "within minutes" against loads that vary by the hour (arXiv
2401.09670, section 4.3). What is significant it leaves open; these are our numbers for it.
"""

import msgspec

from planner.errors import PlannerError


class ReplanError(PlannerError):
    """A log or rules from which nothing can be concluded."""


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """Detection, forecast and economy of replanning.

    Args:
        window_s: length of the windows that a log is cut into.
        rate_band, length_band, cv_band: relative change against the plan that is no shift. The
            burstiness has a wide one: it moves by tens of percent from window to window.
        noise: standard errors of a window's own estimate by which a band is widened.
        confirm: logarithm of change beyond the band, summed up, that makes a shift. No window
            counts for more than half of it, so that it takes two (see `shift`).
        memory_s: windows older than this are forgotten.
        lookback_s: windows that the forecast and the paired simulation are made from.
        lead_s: how far ahead a rise is carried on; best the least time between replans.
        quantile: of the recent windows' rates that a placement is planned for.
        least_interval_s: between two replans, unless the goodput is exceeded already.
        silence_s: windows without any request are taken for a gap in the log up to so long.
        horizon_s: over which a gain must outweigh the cost of switching.
    """

    window_s: float = 600.0
    rate_band: float = 0.2
    length_band: float = 0.2
    cv_band: float = 0.5
    noise: float = 2.0
    confirm: float = 0.2
    memory_s: float = 24 * 3600.0
    lookback_s: float = 3600.0
    lead_s: float = 3600.0
    quantile: float = 0.9
    least_interval_s: float = 3600.0
    silence_s: float = 3600.0
    horizon_s: float = 4 * 3600.0

    def __post_init__(self) -> None:
        for name in (*_POSITIVE, *_SECONDS):
            if not 0 < getattr(self, name) < float("inf"):
                raise ReplanError(f"{name} must be above zero, not {getattr(self, name):g}")
        if not 0 < self.quantile < 1:
            raise ReplanError(f"the quantile must lie between 0 and 1, not {self.quantile:g}")
        if self.lookback_s < 2 * self.window_s:
            raise ReplanError(
                f"lookback_s must hold two windows of {self.window_s:g} s, "
                f"not {self.lookback_s:g} s"
            )


class SwitchRates(msgspec.Struct, frozen=True, kw_only=True):
    """How fast instances change. The defaults are assumptions, not measurements: give your own.

    Args:
        load_bytes_per_s: weights into one device, all devices at once.
        start_s: of an instance beside its weights: processes, kernels, captured graphs.
        role_s: `SetRole`: the leader changes its policy between two steps, nothing is reloaded.
    """

    load_bytes_per_s: float = 2e9
    start_s: float = 30.0
    role_s: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.load_bytes_per_s < float("inf"):
            raise ReplanError(f"load_bytes_per_s must be above zero, not {self.load_bytes_per_s:g}")
        if not (self.start_s >= 0 and self.role_s >= 0):
            raise ReplanError("start_s and role_s must be zero or above")


_POSITIVE = ("rate_band", "length_band", "cv_band", "noise", "confirm")
_SECONDS = (
    "window_s",
    "memory_s",
    "lookback_s",
    "lead_s",
    "least_interval_s",
    "silence_s",
    "horizon_s",
)
