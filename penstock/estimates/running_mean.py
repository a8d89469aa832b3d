"""Running means: the older a value, the less it weighs."""

from __future__ import annotations

from typing import Final

WEIGHT: Final = 0.1
"""Of the newest value."""
SLOW: Final = 0.02
"""The same for what happens seldom."""


def running_mean(mean: float, newest: float, weight: float = WEIGHT) -> float:
    """The mean once ``newest`` has been taken in."""
    return mean + weight * (newest - mean)
