"""What strategies are told, for tests that ask them without a loop."""

from __future__ import annotations

import math

from penstock.estimates.estimates import Estimates
from penstock.estimates.load import Load
from penstock.strategies.context import Context


def context(
    estimates: Estimates | None = None, now: float = 0.0, draft_due: float = math.inf, requests: int = 1
) -> Context:
    """At ``now``, while so many requests decode; by default nothing has been learned and no draft is due."""
    return Context(now, draft_due, Load(requests=requests), estimates or Estimates())
