"""One request as the engine sees it: committed tokens, the tree above them, and how it ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from penstock.core import FinishReason, SpeculationMetrics
from penstock.messages import SampledToken, Sampling
from penstock.requests.prefix_cache import BLOCK, Block
from penstock.requests.slots import SlotPool
from penstock.strategies.base import Strategy
from penstock.tree import Node, TokenTree


class Output(Protocol):
    """Receives a request's tokens one by one and may end it (a stop string)."""

    def append(self, pick: SampledToken, at: float) -> FinishReason | None:
        """Take a token. Stages wait meanwhile: what decides nothing is left to ``detokenize_pending``."""
        ...

    def detokenize_pending(self) -> None:
        """Do the rest of what the tokens so far call for."""
        ...

    def finish(self, reason: FinishReason, at: float) -> None:
        """No token follows. Catches up first."""
        ...


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

    def committed(self, token: int, position: int) -> Node:
        return self._node(token, position, self._pool.take_committed())

    def _node(self, token: int, position: int, slot: int) -> Node:
        self._next += 1
        return Node(self._next, token, position, slot)


class Request:
    """State of one running request.

    ``token_ids`` are known when it is admitted: the prompt and, after a preemption, what has been produced.
    ``committed`` holds a node per committed token, position by position, as far as they have been given one. The last
    one, once they cover ``token_ids``, is the tree's root, whose successor the target has not told yet. The first of
    them lie in ``blocks``, shared with others; ``reserved`` counts the slots that are set aside for the rest.
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
        priority: int = 0,
        client: str = "",
    ) -> None:
        self.number = number
        self.prompt = list(prompt)
        self.sampling = sampling
        self.max_tokens = max_tokens
        self.stop_ids = stop_ids
        self.strategy = strategy
        self.output = output
        self.priority = priority
        """Lower ones are served earlier."""
        self.client = client
        """Whose it is: clients get the same share of the engine."""
        self.metrics = SpeculationMetrics()
        self.drafted_tree = False
        self.token_ids = self.prompt
        self.committed: list[Node] = []
        self.blocks: list[Block] = []
        self.reserved = 0
        self.cached = 0
        """Prompt tokens that the prefix cache had when it was first computed."""
        self.tree: TokenTree
        self.produced = 0
        self.picks: dict[int, SampledToken] = {}
        self.finished: FinishReason | None = None
        self.losses = 0
        """How often a stage was lost since its latest token."""
        self.error = ""
        """Why it ended without having come to its end, beginning with the field at fault."""
        self.awaits_grammar = False
        """Whether nothing of it can enter because the stages still compile its grammar."""
        self._postponed: list[tuple[Node, bool]] = []
        """Nodes, and whether they had entered when they were asked about."""
        self._postponed_under: Node | None = None

    @property
    def slots_needed(self) -> int:
        """What it takes at most, alone: nobody's successor is asked for after the last token."""
        return len(self.prompt) + self.max_tokens

    @property
    def started(self) -> bool:
        """Whether it has any node: else it waits, or has just been admitted."""
        return bool(self.committed)

    @property
    def prefilling(self) -> bool:
        """Whether tokens of its text still have to enter."""
        return len(self.committed) < len(self.token_ids)

    @property
    def private_nodes(self) -> list[Node]:
        """Committed nodes whose slots it holds alone."""
        return self.committed[len(self.blocks) * BLOCK :]

    @property
    def has_slot(self) -> bool:
        """Whether a further committed token has its slot reserved."""
        return len(self.committed) - len(self.blocks) * BLOCK < self.reserved

    def take_prefill_chunk(self, nodes: Nodes, most: int) -> list[Node]:
        """Give up to ``most`` further tokens of the text their nodes; the last token of all is the root.

        Where the text goes on after them they end with a block, if there is one to be finished.
        """
        first = len(self.committed)
        last = first + most
        if last < len(self.token_ids):
            last = max(last // BLOCK * BLOCK, min(last, first + BLOCK))
        for position in range(first, min(last, len(self.token_ids))):
            self.committed.append(nodes.committed(self.token_ids[position], position))
        if not self.prefilling:
            self.tree = TokenTree(self.committed[-1], nodes)
        return self.committed[first:]

    def attach_block(self, block: Block) -> None:
        """Go on behind a block that others have computed, or still compute ahead of whatever enters now."""
        assert len(self.committed) == len(self.blocks) * BLOCK
        self.blocks.append(block)
        self.committed += [replace(node, children={}) for node in block.nodes]
        if not self.produced:
            self.cached = len(self.committed)

    def reset_for_recompute(self) -> None:
        """Give up every node, to begin anew with what is committed by now."""
        for node in self.committed:
            node.alive = node.open = False
        self.token_ids = self.tokens
        self.committed, self.blocks, self.picks, self.reserved = [], [], {}, 0
        self.drafted_tree, self._postponed = False, []

    @property
    def tokens(self) -> list[int]:
        """The prompt and all that has been produced."""
        return self.token_ids if self.prefilling else [node.token for node in self.committed]

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
        live = [(n, had) for n, had in self._postponed if n.open]
        self._postponed = [] if moved else [(node, had) for node, had in live if had or not node.entered]
        return [node for node, had in live if moved or (node.entered and not had)]

    def path(self, node: Node) -> list[int]:
        """Token ids from the prompt's first to ``node``'s, inclusive. ``node`` is in the tree."""
        return [committed.token for committed in self.committed] + self.path_below_root(node)

    def path_below_root(self, node: Node) -> list[int]:
        """Token ids from the root's child down to ``node``'s, inclusive; none of the root itself."""
        above: list[int] = []
        current: Node | None = node
        while current is not None and current is not self.tree.root:
            above.append(current.token)
            current = current.parent
        return above[::-1]

    def end_of(self, token: int) -> FinishReason | None:
        """Whether the request is over with this committed token, not looking at its text."""
        if token in self.stop_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if self.produced >= self.max_tokens else None
