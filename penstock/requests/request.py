"""One request as the engine sees it: certain tokens, the tree above them, and how it ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from penstock.core import FinishReason, SpeculationMetrics
from penstock.messages import Pick, Sampling
from penstock.requests.slots import SlotPool
from penstock.strategies.base import Strategy
from penstock.tree import Node, TokenTree


class Output(Protocol):
    """Receives a request's tokens one by one and may end it (a stop string)."""

    def append(self, pick: Pick, at: float) -> FinishReason | None: ...

    def finish(self, reason: FinishReason, at: float) -> None: ...


class Nodes:
    """Names nodes (numbers never reused in a session) and finds their slots."""

    def __init__(self, pool: SlotPool) -> None:
        self._pool = pool
        self._next = 0

    @property
    def room(self) -> int:
        return self._pool.room

    def speculative(self, token: int, position: int) -> Node:
        return self._node(token, position, self._pool.take_speculative())

    def certain(self, token: int, position: int) -> Node:
        return self._node(token, position, self._pool.take_certain())

    def _node(self, token: int, position: int, slot: int) -> Node:
        self._next += 1
        return Node(self._next, token, position, slot)


class Request:
    """State of one running request.

    ``certain`` holds a node per certain token, position by position; the last of them is the tree's root, whose
    successor the target has not told yet. ``entered`` prompt tokens have been fed to the stages.
    ``drafted_tree`` says that the present root was itself drafted, so that its tree has been counted.
    """

    def __init__(
        self,
        number: int,
        prompt: Sequence[int],
        sampling: Sampling,
        max_tokens: int,
        stop_ids: frozenset[int],
        strategy: Strategy,
        output: Output,
    ) -> None:
        self.number = number
        self.prompt = list(prompt)
        self.sampling = sampling
        self.max_tokens = max_tokens
        self.stop_ids = stop_ids
        self.strategy = strategy
        self.output = output
        self.metrics = SpeculationMetrics()
        self.drafted_tree = False
        self.certain: list[Node] = []
        self.tree: TokenTree
        self.entered = 0
        self.produced = 0
        self.picks: dict[int, Pick] = {}
        self.finished: FinishReason | None = None
        self._postponed: list[tuple[Node, bool]] = []
        """Nodes, and whether they had entered when they were asked about."""
        self._postponed_under: Node | None = None

    @property
    def slots_needed(self) -> int:
        return len(self.prompt) + self.max_tokens

    @property
    def prefilling(self) -> bool:
        """Whether prompt tokens still have to enter."""
        return self.entered < len(self.prompt)

    def start(self, nodes: Nodes) -> None:
        """Give every prompt token its node; the last one is the root."""
        for position, token in enumerate(self.prompt):
            self.certain.append(nodes.certain(token, position))
        self.tree = TokenTree(self.certain[-1], nodes)

    def postpone(self, node: Node, entered: bool) -> None:
        """The drafter could not say what follows ``node``: ask again under another root, or once it has entered.

        ``entered``: whether it had when the drafter was asked; it may have entered since.
        """
        self._postponed.append((node, entered))
        self._postponed_under = self.tree.root

    def take_postponed(self) -> list[Node]:
        """Nodes that are to be asked about again: now that the root has moved on all, else those that have entered."""
        if not self._postponed:
            return []
        moved = self._postponed_under is not self.tree.root
        live = [(n, had) for n, had in self._postponed if n.alive and n.position >= self.tree.root.position]
        self._postponed = [] if moved else [(node, had) for node, had in live if had or not node.entered]
        return [node for node, had in live if moved or (node.entered and not had)]

    def path(self, node: Node) -> list[int]:
        """Token ids from the prompt's first to ``node``'s, inclusive. ``node`` is in the tree."""
        above: list[int] = []
        current: Node | None = node
        while current is not None and current is not self.tree.root:
            above.append(current.token)
            current = current.parent
        return [certain.token for certain in self.certain] + above[::-1]

    def end_of(self, token: int) -> FinishReason | None:
        """Whether the request is over with this committed token, not looking at its text."""
        if token in self.stop_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if self.produced >= self.max_tokens else None
