"""A request's draft tree for the live view: the committed tokens that it grew from, and its most probable nodes."""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field
from typing import Final

from penstock.engine.commit import Advance
from penstock.requests.request import Request
from penstock.tree import Node, TokenTree

DRAWN: Final = 60
"""Most nodes of a tree that are drawn."""
PATH: Final = 8
"""Committed tokens that are shown, the root included."""
DRAFTED, IN_FLIGHT, ANSWERED = "drafted", "in flight", "answered"


@dataclass(frozen=True)
class CommittedToken:
    """A committed token. ``hit`` is whether it had been drafted."""

    node: int
    token: int
    hit: bool


@dataclass(frozen=True)
class NodeView:
    """A live node: its parent, its depth below the root, and the state of its verification."""

    node: int
    parent: int
    depth: int
    token: int
    state: str


@dataclass(frozen=True)
class TreeView:
    """A tree at one moment. ``size`` counts all its nodes below the root, drawn or not; the path ends in the root.

    ``position`` is the root's position in the text.
    """

    number: int
    root: int
    position: int
    size: int
    path: list[CommittedToken]
    nodes: list[NodeView]


@dataclass
class Hits:
    """Whether each of a request's last committed tokens had been drafted."""

    last: deque[bool] = field(default_factory=lambda: deque(maxlen=PATH))

    def advanced(self, done: Advance) -> None:
        self.last.extend(i < done.hits for i in range(len(done.committed)))


def tree_view(request: Request, hits: Hits) -> TreeView:
    """A drawing of a request's tree. Call it on the engine's thread, to which the tree belongs."""
    tree = request.tree
    nodes = [NodeView(n.id, n.parent.id if n.parent else 0, depth(n, tree), n.token, state(n)) for n in likeliest(tree)]
    return TreeView(request.number, tree.root.id, tree.root.position, tree.size - 1, path(request, hits), nodes)


def path(request: Request, hits: Hits) -> list[CommittedToken]:
    """The last committed tokens with their hits, as far as they were watched; at least the root."""
    # Where no commit has been seen yet the root is shown alone, as a hit.
    known = list(hits.last) or [True]
    nodes = request.committed[-len(known) :]
    return [CommittedToken(node.id, node.token, hit) for node, hit in zip(nodes, known, strict=True)]


def likeliest(tree: TokenTree) -> list[Node]:
    """The nodes below the root with the highest scores. No score is above the parent's, so parents come first."""
    heap = [(-child.score, child.id, child) for child in tree.root.children.values()]
    heapq.heapify(heap)
    found: list[Node] = []
    while heap and len(found) < DRAWN:
        node = heapq.heappop(heap)[2]
        found.append(node)
        for child in node.children.values():
            heapq.heappush(heap, (-child.score, child.id, child))
    return found


def depth(node: Node, tree: TokenTree) -> int:
    return node.position - tree.root.position


def state(node: Node) -> str:
    if node.picked is not None:
        return ANSWERED
    return IN_FLIGHT if node.entered else DRAFTED
