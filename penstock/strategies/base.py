"""What a strategy is: it decides which nodes of a request's tree are drafted from and which enter next."""

from __future__ import annotations

import math
from typing import Final, Protocol

from penstock.strategies.context import Context
from penstock.tree import Node, TokenTree

NOW: Final = -math.inf
"""For ``ready_at``: rows can enter."""
ON_EVENT: Final = math.inf
"""For ``ready_at``: nothing can enter until something has happened, a result or a draft."""


class Strategy(Protocol):
    """One per request; plain Python, no clock: what it has to know of the engine is in the ``context`` of each call.

    Invariants that the engine relies on: a parent never enters after its child, and a node enters once.
    """

    rate_limited: bool
    """Whether batches follow each other no faster than the slowest stage takes them: none then waits inside the
    pipeline, and each is composed as late as it can be."""

    sends_root_first: bool
    """Whether a new root enters alone and as soon as it can, whatever the drafter may say: before that is asked."""

    on_trial: bool
    """Whether it decodes plainly while ``estimates.trials`` say so, so that these may measure it."""

    @property
    def candidates(self) -> int:
        """How many candidates the drafter is to give for each node it is asked about; 0 if it is never asked."""
        ...

    def corrects(self, context: Context) -> bool:
        """Whether the drafter may answer again for nodes that it has answered for: ``tree.corrected``."""
        ...

    def ask(self, tree: TokenTree, context: Context) -> list[Node]:
        """Nodes whose candidates are wanted now, parents first: not yet asked for (``node.asked``), or asked for anew
        (``tree.redraft``)."""
        ...

    def holds_results(self, context: Context) -> bool:
        """Whether what has come out is to be looked at with a later result, and not now."""
        ...

    def ready_at(self, tree: TokenTree, context: Context) -> float:
        """``NOW`` if ``enter`` would name any row, a later moment at which to ask again, or ``ON_EVENT``.

        The engine asks again after every event, and at that moment where none comes before. Changes no row; a strategy
        may note how long it has waited.
        """
        ...

    def can_piggyback(self, tree: TokenTree, context: Context) -> bool:
        """Whether rows of a tree whose root has entered are worth a place in a batch that other requests fill."""
        ...

    def enter(self, tree: TokenTree, context: Context) -> list[Node]:
        """The first stage can take a batch: grow the tree if need be and name the rows that enter, parents first.

        The prompt, its last token (the first root) included, enters before any strategy is asked.
        """
        ...


def now_if(ready: bool) -> float:
    """What ``ready_at`` returns where only an event can change the answer."""
    return NOW if ready else ON_EVENT
