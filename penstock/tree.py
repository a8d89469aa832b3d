"""The token tree of one request: its live nodes, rooted at the last committed token."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(slots=True, eq=False)
class Node:
    """A token at a position of one request: drafted, or committed (the root and the nodes before it).

    ``id`` is never reused in a session; ``slot`` is the number of its KV slot. ``chance`` is the natural log of the
    probability that the target picks this node after its parent, as the drafter estimates it. ``score`` is the sum of
    the chances along the path, from the root at which the tree began (not the present one) down to this node. A commit
    therefore changes no score; counted from the present root it is ``node.score - root.score``.

    ``asked`` says that the drafter was asked for the node's candidates, ``entered`` that its row is in a batch.
    ``stream`` is the number of that batch, -1 before, and ``due`` the time in seconds at which its result is expected.
    ``picked`` is the target's next token after this node, once the last stage has sent it. A node is ``alive`` until
    its branch is known to be wrong; it is ``open`` as long as it is the root or a live node below it: only open nodes
    get children. ``candidates`` are the children that the drafter proposes, best first, as (token, chance); None until
    the drafter has answered. ``earlier`` holds its replaced answers, oldest first: a correction or a later answer took
    their place.
    """

    id: int
    token: int
    position: int
    slot: int
    parent: Node | None = None
    chance: float = 0.0
    score: float = 0.0
    children: dict[int, Node] = field(default_factory=dict)
    alive: bool = True
    open: bool = True
    asked: bool = False
    entered: bool = False
    stream: int = -1
    due: float = math.inf
    picked: int | None = None
    candidates: Sequence[tuple[int, float]] | None = None
    earlier: tuple[Sequence[tuple[int, float]], ...] = ()


class NodeSource(Protocol):
    """The interface through which a tree gets new nodes, each with a number and a slot."""

    @property
    def room(self) -> int:
        """Number of further speculative nodes that can have a slot now."""
        ...

    def speculative(self, token: int, position: int) -> Node:
        """A new drafted node in the lowest free slot. Raises PenstockError if ``room`` is 0."""
        ...


class TokenTree:
    """Live nodes of one request. Siblings are unique by token; dead nodes leave the tree and never come back.

          root (committed)          commit(b): root = b; a and c die with d; e and f stay.
          /    |    \\
         a     b     c            miss: everything below the root dies, and the target's
         |    / \\                      token, which nobody drafted, becomes the new root.
         d   e   f
    """

    def __init__(self, root: Node, source: NodeSource) -> None:
        self.root = root
        self.size = 1
        self.corrected: list[Node] = []
        """Nodes whose answers the drafter has corrected and the strategy has not processed yet."""
        self._source = source
        self._frontier: list[Node] | None = None
        """All live nodes of the level that was deepest at the last call of ``frontier``; None: start at the root."""

    @property
    def room(self) -> int:
        """Number of further nodes that the tree can take now."""
        return self._source.room

    def nodes(self) -> Iterator[Node]:
        """All live nodes, level by level, hence parents before children."""
        return descendants(self.root)

    def frontier(self) -> list[Node]:
        """The live nodes of the deepest level. The caller must not change the list."""
        # Starts at the level that was deepest at the last call: the walk costs what has grown below it since, not the
        # whole tree.
        level = self._frontier or [self.root]
        while below := [child for node in level for child in node.children.values()]:
            level = below
        self._frontier = level
        return level

    def extend(self, parent: Node, token: int, chance: float) -> Node:
        """A new leaf below ``parent``, which must be alive and have no child with this token."""
        assert parent.alive, "a dead node cannot grow"
        assert token not in parent.children, "siblings are unique by token"
        node = self._source.speculative(token, parent.position + 1)
        # The log chances add up along the path, as the probabilities multiply.
        node.parent, node.chance, node.score = parent, chance, parent.score + chance
        parent.children[token] = node
        self.size += 1
        # The cached level lacks this node and is no longer whole. A node below it needs nothing: it is walked to.
        if self._frontier and self._frontier[0].position == node.position:
            self._frontier = None
        return node

    def correct(self, node: Node, candidates: Sequence[tuple[int, float]]) -> None:
        """Replace the drafter's answer for ``node``. Its children keep their chances until the strategy rescores."""
        assert node.candidates, "a correction follows an answer"
        node.earlier = (*node.earlier, node.candidates)
        node.candidates = candidates
        self.corrected.append(node)

    def redraft(self, node: Node) -> None:
        """Let the drafter be asked about ``node`` again. Its children stay as they are."""
        if node.candidates:
            node.earlier = (*node.earlier, node.candidates)
        node.candidates, node.asked = None, False

    def rescore(self, parents: Sequence[Node]) -> set[Node]:
        """Recompute the scores below ``parents``, the higher ones first, from their children's new chances.

        ``parents`` are sorted by position: a node's own score has to be right before those below it are computed from
        it. Returns the nodes whose score has changed.
        """
        moved: set[Node] = set()
        for parent in parents:
            queue = [parent]
            for node in queue:
                for child in node.children.values():
                    score = node.score + child.chance
                    if score != child.score:  # equal: all below is right, or a later one of ``parents`` corrects it
                        child.score = score
                        queue.append(child)
            moved.update(queue[1:])
        return moved

    def commit(self, token: int) -> tuple[Node | None, list[Node]]:
        """Follow the root's child that carries ``token``.

        Returns that child, now the root, and the nodes that died with the other branches; or, on a miss, None and
        every node below the root: the caller restarts the tree from the target's token.
        """
        # Read first: ``discard`` resets both.
        live, level = self.size, self._frontier or []
        # Taken out before the rest is discarded, so that the hit's branch stays alive.
        hit = self.root.children.pop(token, None)
        dead = self.discard()
        if hit is not None:
            hit.parent = None
            # The old root is committed, hence alive, but nothing grows from it any more.
            self.root.open = False
            self.root = hit
            self.size = live - len(dead) - 1  # 1 is the old root
            # The survivors of a whole level are still a whole level.
            self._frontier = [node for node in level if node.open] or None
        return hit, dead

    def restart(self, root: Node) -> None:
        """Begin anew from ``root``, a node whose token has been committed.

        The caller has discarded the old tree before (``commit`` does so on a miss).
        """
        self.root.open = False
        self.root = root
        self.size = 1
        self._frontier = None

    def discard(self) -> list[Node]:
        """Kill every node below the root and return them.

        They lose their children: without that reference cycle an unused node is freed at once, not by the collector.
        """
        dead = list(self.root.children.values())
        self.root.children = {}
        for node in dead:  # the list grows while it is walked
            node.alive = node.open = False
            if node.children:
                dead += node.children.values()
                node.children = {}
        self.size = 1
        self._frontier = None
        return dead


def descendants(node: Node) -> Iterator[Node]:
    """``node`` and everything below it, level by level."""
    queue = [node]
    for current in queue:
        yield current
        queue.extend(current.children.values())
