"""The synthetic profile that simulations draw from where no recording is named."""

from __future__ import annotations

ACCURACY = (0.70, 0.80, 0.85, 0.88, *(round(0.88 + 0.07 * k / 12, 4) for k in range(1, 13)))
"""Chance that the target's token is among the first 1, 2, ... candidates."""
