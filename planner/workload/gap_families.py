"""Gamma and Weibull gaps of mean one: likelihood, distance from a sample, generation."""

from enum import StrEnum

import msgspec
import numpy as np
from scipy import special
from scipy.optimize import minimize_scalar

from planner.workload.requests import Floats

# log(shape) is searched between these: a gap CV from 0.05 to far above any trace's.
LOG_SHAPES = (-5.0, 6.0)
# Above this difference in AIC the worse family has essentially no support
# (Burnham and Anderson 2002, section 2.6); below it the KS distance decides.
CLEAR_AIC = 10.0


class GapFamily(StrEnum):
    """A distribution on positive numbers; its scale is set so that the mean is one."""

    GAMMA = "gamma"
    WEIBULL = "weibull"

    def draw(self, shape: float, num: int, random: np.random.Generator) -> Floats:
        if self is GapFamily.GAMMA:
            return random.standard_gamma(shape, num) / shape
        return random.weibull(shape, num) / float(special.gamma(1 + 1 / shape))

    def squared_cv(self, shape: float) -> float:
        """Variance of the gaps; also what the IDC of a renewal process tends to."""
        if self is GapFamily.GAMMA:
            return 1 / shape
        return float(special.gamma(1 + 2 / shape) / special.gamma(1 + 1 / shape) ** 2) - 1

    def cdf(self, shape: float, gaps: Floats) -> Floats:
        if self is GapFamily.GAMMA:
            return np.asarray(special.gammainc(shape, shape * gaps), np.float64)
        scale = float(special.gamma(1 + 1 / shape))
        return np.asarray(-np.expm1(-((gaps * scale) ** shape)), np.float64)

    def mean_log_density(self, shape: float, gaps: Floats) -> float:
        log_gaps = np.log(gaps)
        if self is GapFamily.GAMMA:
            log_norm = shape * np.log(shape) - special.gammaln(shape)
            return float(log_norm + np.mean((shape - 1) * log_gaps - shape * gaps))
        log_rate = special.gammaln(1 + 1 / shape)
        scaled = shape * (log_gaps + log_rate)
        return float(np.log(shape) + np.mean(scaled - log_gaps - np.exp(scaled)))


class GapFit(msgspec.Struct, frozen=True):
    """A family fitted to gaps of mean one: its shape, and how well it does."""

    family: GapFamily
    shape: float
    aic: float
    ks_distance: float


def fit_gaps(gaps: Floats) -> tuple[GapFit, GapFit]:
    """Both families by maximum likelihood, the better one first."""
    by_aic = sorted((_fit(family, gaps) for family in GapFamily), key=lambda fit: fit.aic)
    best, other = by_aic
    if other.aic - best.aic < CLEAR_AIC and other.ks_distance < best.ks_distance:
        best, other = other, best
    return best, other


def _fit(family: GapFamily, gaps: Floats) -> GapFit:
    found = minimize_scalar(
        lambda log_shape: -family.mean_log_density(float(np.exp(log_shape)), gaps),
        bounds=LOG_SHAPES,
        method="bounded",
    )
    shape = float(np.exp(found.x))
    aic = 2.0 + 2 * len(gaps) * float(found.fun)
    return GapFit(family, shape, aic, ks_distance(np.sort(family.cdf(shape, gaps))))


def ks_distance(sorted_cdf: Floats) -> float:
    """Kolmogorov-Smirnov distance of a sample, given as the model's CDF at its sorted values."""
    steps = np.arange(len(sorted_cdf) + 1) / len(sorted_cdf)
    return float(max((steps[1:] - sorted_cdf).max(), (sorted_cdf - steps[:-1]).max()))
