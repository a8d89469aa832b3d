"""The information that a strategy is given with every call."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.estimates.estimates import Estimates
from penstock.estimates.load import Load


@dataclass(frozen=True, slots=True)
class Context:
    """A snapshot that the loop makes for each round of calls. Strategies only read it."""

    now: float
    """Present time in seconds by the engine's clock, like all times."""
    draft_due: float
    """Time at which the drafter is expected to answer; infinite while it has not been asked."""
    load: Load
    estimates: Estimates
    oldest: int | None
    """Stream number of the batch that comes out next; None while nothing is in flight."""
    foretold: bool
    """Whether the drafter costs nothing, so that it is also asked where nothing drafted is sent."""
    redrafts: bool
    """Whether the drafter may know more about a node when it is asked about it again."""
