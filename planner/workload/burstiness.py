"""How bursty arrivals are: variation of the gaps, dispersion of the counts.

The gaps' CV alone misleads: the Azure conversation trace has 1.09, close to Poisson, while its
counts per minute vary twenty times as much as Poisson's do, because the rate drifts.
"""

import numpy as np

from planner.workload.requests import Floats

IDC_BINS_S = (1.0, 10.0, 60.0)


def gap_cv(arrival_s: Floats) -> float:
    """Standard deviation over mean of the gaps; Poisson has 1. At least two gaps, not all 0."""
    gaps_s = np.diff(arrival_s)
    return float(gaps_s.std() / gaps_s.mean())


def dispersion(arrival_s: Floats, bin_s: float) -> float | None:
    """Index of dispersion of counts (IDC): variance over mean in bins of `bin_s`; Poisson has 1.

    Only whole bins count; fewer than two of them have no variance, and the answer is None.
    """
    since_s = arrival_s - arrival_s[0]
    num_bins = int(since_s[-1] // bin_s)
    if num_bins < 2:
        return None
    counts = np.bincount((since_s // bin_s).astype(np.int64))[:num_bins]
    return float(counts.var() / counts.mean()) if counts.any() else None
