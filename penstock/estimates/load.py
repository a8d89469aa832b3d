"""The engine's work besides the request that a strategy is asked about."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from penstock.tree import Node, TokenTree


class Load(NamedTuple):
    """How far the batch, or the drafter's round, has been composed. Each addition returns a new ``Load``."""

    requests: int = 1
    """Requests that decode, the one asked about included."""
    rows: int = 0
    """Rows that are in the batch already."""
    expected_tokens: float = 0.0
    """Tokens that these rows are expected to yield: the sum of their chances."""
    following: int = 0
    """Requests whose rows join the batch after those of the one asked about."""
    asked: int = 0
    """Nodes that the drafter is already to be asked about in this round."""
    prefilling: int = 0
    """Running requests whose prompts are being computed."""

    @property
    def running(self) -> int:
        return self.requests + self.prefilling

    def with_rows(self, tree: TokenTree, rows: Sequence[Node]) -> Load:
        """The load with these rows of a request's tree added to the batch."""
        tokens = sum(math.exp(node.score - tree.root.score) for node in rows)
        return self._replace(rows=self.rows + len(rows), expected_tokens=self.expected_tokens + tokens)

    def with_asked(self, nodes: int) -> Load:
        """The load with ``nodes`` more nodes to ask the drafter about."""
        return self._replace(asked=self.asked + nodes)
