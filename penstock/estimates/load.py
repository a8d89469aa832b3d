"""What there is to do besides the request that a strategy is asked about."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from penstock.tree import Node, TokenTree


class Load(NamedTuple):
    """While a batch or a round of the drafter is composed: how far it has got. Each addition gives a new one."""

    requests: int = 1
    """That decode, the one asked about included."""
    rows: int = 0
    """In the batch already."""
    expected_tokens: float = 0.0
    """Tokens that these rows are expected to give: the sum of their chances."""
    following: int = 0
    """Requests whose rows join the batch after those of the one asked about."""
    asked: int = 0
    """Nodes that the drafter is to be asked about already."""
    prefilling: int = 0
    """Requests that run, too, and whose prompts are being computed."""

    @property
    def running(self) -> int:
        return self.requests + self.prefilling

    def with_rows(self, tree: TokenTree, rows: Sequence[Node]) -> Load:
        """These rows of a request's tree are in the batch, too."""
        tokens = sum(math.exp(node.score - tree.root.score) for node in rows)
        return self._replace(rows=self.rows + len(rows), expected_tokens=self.expected_tokens + tokens)

    def with_asked(self, nodes: int) -> Load:
        """The drafter is to be asked about so many nodes more."""
        return self._replace(asked=self.asked + nodes)
