"""Base class of drafters that answer as soon as they are asked."""

from __future__ import annotations

from penstock.drafters.base import Draft
from penstock.estimates.draft_timing import DraftTiming
from penstock.estimates.drafts import DraftQuality
from penstock.requests.request import Request


class InstantDrafter:
    """Holds answers until they are polled; subclasses define ``ask``."""

    def __init__(self) -> None:
        self._answers: list[Draft] = []

    @property
    def reads_target(self) -> bool:
        return False

    @property
    def free(self) -> bool:
        return True

    @property
    def busy(self) -> bool:
        return bool(self._answers)

    @property
    def timing(self) -> DraftTiming:
        return DraftTiming()

    def calibrate_by(self, quality: DraftQuality) -> None:
        """Does nothing: the engine calibrates this drafter's candidates."""

    def poll(self) -> list[Draft]:
        answers, self._answers = self._answers, []
        return answers

    @property
    def due(self) -> float | None:
        return 0.0 if self._answers else None

    def prepare_grammar(self, request: Request) -> None:
        """Does nothing: the drafter ignores grammars."""

    def has_grammar(self, request: Request) -> bool:
        return True

    def forget(self, request: Request) -> None:
        pass

    def close(self) -> None:
        pass
