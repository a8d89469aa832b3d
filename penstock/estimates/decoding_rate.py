"""How fast tokens come, decoded in one way."""

from __future__ import annotations

from typing import Final

MEMORY: Final = 64.0
"""Tokens of each request after which old ones fade: the text changes, and with it how well it is drafted; so does the
host's load."""


class DecodingRate:
    """Mean seconds per token. The older a token, the less it weighs.

    ``requests`` decode together, and a batch brings tokens of many: memory is that many times as long.
    """

    def __init__(self, requests: int = 1) -> None:
        self._keep = 1 - 1 / (MEMORY * requests)
        self.weight = 0.0
        """Tokens that the mean stands for."""
        self._seconds = 0.0

    @property
    def seconds_per_token(self) -> float:
        """0 while nothing is known."""
        return self._seconds / self.weight if self.weight else 0.0

    def record(self, tokens: int, seconds: float) -> None:
        """So many tokens took so long."""
        kept = self._keep**tokens
        self.weight = self.weight * kept + tokens
        self._seconds = self._seconds * kept + seconds

    def age(self, weight: float) -> None:
        """Have what was seen weigh no more than so many new tokens."""
        if self.weight > weight:
            self._seconds *= weight / self.weight
            self.weight = weight
