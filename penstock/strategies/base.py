"""What a strategy is: it decides which nodes of a request's tree are drafted from and which enter next."""

from __future__ import annotations

from typing import Protocol

from penstock.tree import Node, TokenTree


class Strategy(Protocol):
    """One per request; plain Python, no clock. A new strategy is one file of this shape.

    Invariants that the engine relies on: a parent never enters after its child, and a node enters once.
    """

    rate_limited: bool
    """Whether batches follow each other no faster than the slowest stage takes them: none then waits inside the
    pipeline, and each is composed as late as it can be."""

    sends_root_first: bool
    """Whether a new root enters alone and as soon as it can, whatever the drafter may say: before that is asked."""

    @property
    def corrects(self) -> bool:
        """Whether the drafter may answer again for nodes that it has answered for: ``tree.corrected``."""
        ...

    @property
    def candidates(self) -> int:
        """How many candidates the drafter is to give for each node it is asked about; 0 if it is never asked."""
        ...

    def ask(self, tree: TokenTree) -> list[Node]:
        """Nodes whose candidates are wanted now and have not been asked for (``node.asked``), parents first."""
        ...

    def ready(self, tree: TokenTree) -> bool:
        """Whether ``enter`` would name any row now. Changes no row; a strategy may note how long it has waited."""
        ...

    def can_piggyback(self, tree: TokenTree) -> bool:
        """Whether rows of a tree whose root has entered are worth a place in a batch that other requests fill."""
        ...

    def enter(self, tree: TokenTree) -> list[Node]:
        """The first stage can take a batch: grow the tree if need be and name the rows that enter, parents first.

        The prompt, its last token (the first root) included, enters before any strategy is asked.
        """
        ...
