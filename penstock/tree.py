"""The token tree of one request: its live nodes, rooted at the last certain token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Node:
    """A drafted (or, at the root, certain) token at a position.

    ``score`` is the log of the chance that the target's output passes through this node, as the drafter sees it:
    the sum of its own and its ancestors' log-chances below the root. ``picked`` is the target's next token after this
    node once the last stage has said so. ``candidates`` are the drafter's children for it, best first, as
    (token, log-chance); None until it has answered.
    """

    id: int
    token: int
    position: int
    slot: int
    parent: Node | None
    score: float = 0.0
    children: dict[int, Node] = field(default_factory=dict)
    alive: bool = True
    entered: bool = False
    asked: bool = False
    picked: int | None = None
    candidates: Sequence[tuple[int, float]] | None = None


class TokenTree:
    """Live nodes of one request. Siblings are unique by token; dead nodes leave the tree and never come back.

          root (certain)          commit(b): root = b; a, c and d die, e and f stay.
          /    |    \\
         a     b     c            miss: everything below the root dies, and the target's
         |    / \\                      token becomes a new root that was never drafted.
         d   e   f
    """

    def __init__(self, root: Node) -> None:
        self.root = root
        self.size = 1

    def nodes(self) -> Iterator[Node]:
        """All live nodes, parents before children, oldest branch first."""
        return descendants(self.root)

    def add(self, parent: Node, node: Node) -> None:
        """Attach a new leaf. The caller guarantees that ``parent`` has no child with this token."""
        assert parent.alive and node.token not in parent.children and node.parent is parent
        parent.children[node.token] = node
        self.size += 1

    def commit(self, token: int) -> tuple[Node | None, list[Node]]:
        """Follow the root's child that carries ``token``.

        Returns that child, now the root, and the nodes that died with the other branches; or, on a miss, None and
        every node below the root. The old root has become part of the certain prefix in both cases.
        """
        hit = self.root.children.pop(token, None)
        dead = [node for child in self.root.children.values() for node in descendants(child)]
        for node in dead:
            node.alive = False
        self.root.children = {}
        if hit is None:
            self.size = 0
            return None, dead
        # Scores are relative to the root, which is now certain.
        for node in descendants(hit):
            if node is not hit:
                node.score -= hit.score
        hit.score, hit.parent = 0.0, None
        self.root = hit
        self.size -= len(dead) + 1
        return hit, dead

    def restart(self, root: Node) -> None:
        """Begin anew from a token that is certain but was not drafted."""
        self.root = root
        self.size = 1

    def discard(self) -> list[Node]:
        """Kill every node below the root (the request ends) and return them."""
        dead = [node for child in self.root.children.values() for node in descendants(child)]
        for node in dead:
            node.alive = False
        self.root.children = {}
        self.size = 1
        return dead


def descendants(node: Node) -> Iterator[Node]:
    """``node`` and everything below it, parents before children."""
    queue = [node]
    for current in queue:
        yield current
        queue.extend(current.children.values())
