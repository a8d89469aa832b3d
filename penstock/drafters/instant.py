"""What drafters share that answer as soon as they are asked."""

from __future__ import annotations

from penstock.drafters.base import Draft
from penstock.estimates.draft_timing import DraftTiming
from penstock.estimates.drafts import DraftQuality
from penstock.requests.request import Request


class InstantDrafter:
    """Holds the answers until they are polled; ``ask`` is the drafter's own."""

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
        """Nothing: the engine calibrates what the drafter says."""

    def poll(self) -> list[Draft]:
        answers, self._answers = self._answers, []
        return answers

    @property
    def due(self) -> float | None:
        return 0.0 if self._answers else None

    def prepare_grammar(self, request: Request) -> None:
        """Nothing: the drafter knows of no grammar."""

    def has_grammar(self, request: Request) -> bool:
        return True

    def forget(self, request: Request) -> None:
        pass

    def close(self) -> None:
        pass
