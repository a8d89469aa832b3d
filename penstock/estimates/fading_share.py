"""A share that begins at its expected value and is learned from observations."""

from __future__ import annotations

from typing import Final

TRUST: Final = 4.0
"""Weight of the expected value, in observations."""


class FadingShare:
    """(TRUST x expected + sum of values) / (TRUST + number of values), with old values fading over
    ``memory`` of them."""

    def __init__(self, memory: float) -> None:
        self._keep = 1 - 1 / memory
        self._sum = 0.0
        self._seen = 0.0

    def record(self, value: float) -> None:
        self._sum = self._keep * self._sum + value
        self._seen = self._keep * self._seen + 1.0

    def of(self, expected: float) -> float:
        return (TRUST * expected + self._sum) / (TRUST + self._seen)
