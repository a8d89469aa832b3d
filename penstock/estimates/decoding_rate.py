"""How fast one way of decoding produces tokens."""

from __future__ import annotations

from typing import Final

MEMORY: Final = 64.0
"""Tokens of each request over which old ones fade: the text and its drafts change, and so does the host's load."""


class DecodingRate:
    """Exponentially weighted mean of the seconds per token.

    A batch brings tokens of all ``requests`` that decode together, so the memory is that many times as long.
    """

    def __init__(self, requests: int = 1) -> None:
        self._keep = 1 - 1 / (MEMORY * requests)
        self.weight = 0.0
        """Tokens that the mean stands for, after fading."""
        self._seconds = 0.0

    @property
    def seconds_per_token(self) -> float:
        """Mean seconds per token; 0 while nothing is known."""
        return self._seconds / self.weight if self.weight else 0.0

    def record(self, tokens: int, seconds: float) -> None:
        """Record that ``tokens`` tokens took ``seconds`` together."""
        kept = self._keep**tokens
        self.weight = self.weight * kept + tokens
        self._seconds = self._seconds * kept + seconds

    def age(self, weight: float) -> None:
        """Reduce the weight of what was seen to that of ``weight`` tokens, if it is more."""
        if self.weight > weight:
            self._seconds *= weight / self.weight
            self.weight = weight
