"""Exponentially weighted means."""

from __future__ import annotations

from typing import Final

WEIGHT: Final = 0.1
"""Weight of the newest value."""
SLOW: Final = 0.02
"""Weight of the newest value where events are rare."""


def running_mean(mean: float, newest: float, weight: float = WEIGHT) -> float:
    """The mean after ``newest`` has been included."""
    return mean + weight * (newest - mean)
