"""Contexts for tests that call strategies without a loop."""

from __future__ import annotations

import math

from penstock.estimates.estimates import Estimates, Load
from penstock.strategies.base import Context


def context(
    estimates: Estimates | None = None,
    now: float = 0.0,
    draft_due: float = math.inf,
    requests: int = 1,
    oldest: int | None = None,
    foretold: bool = False,
    redrafts: bool = False,
) -> Context:
    """A context at ``now``, while ``requests`` decode.

    By default nothing has been learned, no draft is due, nothing is in flight, and the drafter takes time and reads
    none of the target's states.
    """
    return Context(now, draft_due, Load(requests=requests), estimates or Estimates(), oldest, foretold, redrafts)
