"""On which terms a page is made: the attainment target, how many runs, and who watches."""

from collections.abc import Callable
from dataclasses import dataclass

from planner.placement.options import Options
from planner.verdict import Effort

# Shorter runs than those of `distserve plan`. Baselines and sensitivity are left out, for the
# report looks at those elsewhere.
SEARCH = Options(
    first=Effort(500, 500),
    final=Effort(1_000, 2_000),
    with_baselines=False,
    with_sensitivity=False,
)


def unwatched(label: str) -> None:
    """Nobody looks."""


@dataclass(frozen=True)
class Terms:
    """Args:
    percent: attainment target, 90 (section 6.2) or 99 (appendix C).
    num_seeds: runs for every simulated point; 2 at least, for a band needs a spread.
    search: how placement searches go about it.
    watch: told what is being simulated.
    """

    percent: int = 90
    num_seeds: int = 10
    search: Options = SEARCH
    watch: Callable[[str], None] = unwatched

    @property
    def share(self) -> float:
        return self.percent / 100

    @property
    def seeds(self) -> range:
        return range(self.num_seeds)

    @property
    def runs(self) -> str:
        """For the sources of a page."""
        return f"{self.num_seeds} seeds"
