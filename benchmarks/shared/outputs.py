"""An output that a request can write into."""

from __future__ import annotations

from penstock.core import FinishReason
from penstock.messages import SampledToken


class Deaf:
    """An output that keeps nothing."""

    def append(self, pick: SampledToken, at: float) -> FinishReason | None:
        return None

    def detokenize_pending(self) -> None:
        pass

    def finish(self, reason: FinishReason, at: float, plain_s: float = 0.0) -> None:
        pass
