"""Does a sample follow an exact distribution? Shared by unit and integration tests."""

from __future__ import annotations

import numpy as np
from scipy import stats

MINIMUM_EXPECTED = 5.0
"""Below this expected count the chi-square approximation is poor (Cochran's rule)."""


def chi_square_p_value(observed_counts: np.ndarray, probabilities: np.ndarray) -> float:
    """Pearson's goodness-of-fit p-value. Both arrays have the same shape and one entry per outcome.

    Outcomes expected fewer than five times are pooled into one cell (with the rarest other one, should five still not
    be reached). An outcome of probability 0 that was observed gives 0. Raises ValueError when the probabilities do
    not sum to 1 or when fewer than two cells remain, so that nothing would be tested.
    """
    observed = np.asarray(observed_counts, dtype=np.float64).ravel()
    expected = np.asarray(probabilities, dtype=np.float64).ravel() * observed.sum()
    if not np.isclose(expected.sum(), observed.sum(), rtol=1e-9):
        raise ValueError(f"probabilities sum to {expected.sum() / observed.sum()}")
    if observed[expected == 0].any():
        return 0.0
    order = np.argsort(expected)
    pooled = int((expected < MINIMUM_EXPECTED).sum())
    while pooled and expected[order[:pooled]].sum() < MINIMUM_EXPECTED and pooled < len(order):
        pooled += 1
    cells = [np.append(column[order[pooled:]], column[order[:pooled]].sum()) for column in (observed, expected)]
    observed, expected = (column[cells[1] > 0] for column in cells)
    if len(observed) < 2:
        raise ValueError("too few observations: all outcomes fell into one cell")
    return float(stats.chisquare(observed, expected).pvalue)
