"""The interface of strategies: which nodes of a request's tree are drafted from, and which enter next."""

from __future__ import annotations

import math
from typing import Final, Protocol

from penstock.strategies.context import Context
from penstock.tree import Node, TokenTree

NOW: Final = -math.inf
"""Returned by ``ready_at`` if rows can enter now."""
ON_EVENT: Final = math.inf
"""Returned by ``ready_at`` if nothing can enter until an event, a result or a draft, has happened."""


class Strategy(Protocol):
    """Decides for one request. Plain Python without a clock: the ``context`` of each call holds what it may know.

    The engine relies on two invariants: a parent never enters after its child, and a node enters once.
    """

    rate_limited: bool
    """Whether batches follow each other no faster than the slowest stage takes them. None then waits inside the
    pipeline, and each is composed as late as possible."""

    sends_root_first: bool
    """Whether a new root enters alone and at once, before the drafter is asked."""

    on_trial: bool
    """Whether the strategy decodes plainly while ``estimates.trials`` ask for it, so that they can measure it."""

    @property
    def candidates(self) -> int:
        """Number of candidates wanted from the drafter for each node; 0 if the drafter is never asked."""
        ...

    def corrects(self, context: Context) -> bool:
        """Whether the drafter may correct its answers for nodes (``tree.corrected``)."""
        ...

    def ask(self, tree: TokenTree, context: Context) -> list[Node]:
        """Nodes whose candidates are wanted now, parents first. They have not been asked for (``node.asked``), or are
        to be asked for again (``tree.redraft``)."""
        ...

    def holds_results(self, context: Context) -> bool:
        """Whether results that have come out are kept until a later one, and not handled now."""
        ...

    def ready_at(self, tree: TokenTree, context: Context) -> float:
        """``NOW`` if ``enter`` would name any row, a later time at which to ask again, or ``ON_EVENT``.

        The engine asks again after every event, and at the returned time if there is none before. The call changes no
        row; the strategy may note how long it has waited.
        """
        ...

    def can_piggyback(self, tree: TokenTree, context: Context) -> bool:
        """Whether a tree whose root has entered has rows worth a place in a batch composed for other requests."""
        ...

    def enter(self, tree: TokenTree, context: Context) -> list[Node]:
        """Grow the tree if necessary and return the rows that enter the next batch, parents first.

        Called when the first stage can take a batch. The prompt enters before any strategy is asked, and with it the
        first root, its last token.
        """
        ...


def now_if(ready: bool) -> float:
    """The value of ``ready_at`` where only an event can change the answer."""
    return NOW if ready else ON_EVENT
