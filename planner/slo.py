"""The objective: a TTFT and a TPOT target, and the share of requests that must meet both."""

from dataclasses import dataclass

from planner.errors import TargetError


@dataclass(frozen=True)
class Slo:
    """Targets in seconds; `attainment` is the share that must meet both (paper section 2.1)."""

    ttft_s: float
    tpot_s: float
    attainment: float = 0.9

    def __post_init__(self) -> None:
        if not self.ttft_s > 0:
            raise TargetError(f"the TTFT target must be above zero, not {self.ttft_s:g} s")
        if not self.tpot_s > 0:
            raise TargetError(f"the TPOT target must be above zero, not {self.tpot_s:g} s")
        if not 0 < self.attainment < 1:
            raise TargetError(
                f"the attainment target must lie between 0 and 1, not {self.attainment:g}"
            )

    def scaled(self, factor: float) -> "Slo":
        """Both targets multiplied: the paper's SLO scale (section 6.2)."""
        return Slo(self.ttft_s * factor, self.tpot_s * factor, self.attainment)
