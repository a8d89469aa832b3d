"""What a strategy is told whenever it is asked: the moment, what is due, what else there is to do, what is known."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.estimates.estimates import Estimates
from penstock.estimates.load import Load


@dataclass(frozen=True, slots=True)
class Context:
    """Made by the loop for each round of questions. Strategies read it and write nothing of it."""

    now: float
    """The clock's seconds, as are all moments."""
    draft_due: float
    """When the drafter is expected to answer; infinite while it has not been asked."""
    load: Load
    estimates: Estimates
    oldest: int | None
    """The number of the batch that comes out next; None while nothing is in flight."""
    foretold: bool
    """Whether the drafter costs nothing, so that it is asked also where nothing drafted is sent."""
    redrafts: bool
    """Whether the drafter may know more of a node when it is asked about it again."""
