"""One request in the engine: its committed tokens, the tree above them, and how it ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from penstock.core import FinishReason, SpeculationMetrics
from penstock.messages import SampledToken, Sampling
from penstock.requests.slots import BLOCK, Block, SlotPool
from penstock.strategies.base import Strategy
from penstock.tree import Node, TokenTree


class Output(Protocol):
    """The receiver of a request's tokens, which may end the request (by a stop string)."""

    def append(self, pick: SampledToken, at: float) -> FinishReason | None:
        """Take a token at time ``at``. The stages wait: work that decides nothing is for ``detokenize_pending``."""
        ...

    def detokenize_pending(self) -> None:
        """Do the postponed work for the tokens so far."""
        ...

    def finish(self, reason: FinishReason, at: float, plain_s: float = 0.0) -> None:
        """End the output, after any postponed work. No token follows.

        ``plain_s`` is the seconds that each of its tokens would have taken in plain decoding, 0 if that is not known.
        """
        ...


class Nodes:
    """A source of nodes with slots; their numbers are never reused in a session."""

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

    ``token_ids`` are the tokens known at admission: the prompt and, after a preemption or where an answer that was cut
    off goes on (``resumed``), the output so far.
    ``committed`` holds a node per committed token, in position order, as far as prefill has come. Once it covers
    ``token_ids``, its last node is the tree's root, whose next token the target has not picked yet. The first nodes lie
    in ``blocks``, shared with other requests; ``reserved`` counts the slots set aside for the rest. ``drafted_tree``
    says that the present root was itself drafted, so that its tree has already been counted.
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
        resumed: Sequence[int] = (),
    ) -> None:
        self.number = number
        self.prompt = list(prompt)
        self.sampling = sampling
        self.max_tokens = max_tokens
        self.stop_ids = stop_ids
        self.strategy = strategy
        self.output = output
        self.priority = priority
        """Lower numbers are served earlier."""
        self.client = client
        """The client it belongs to; clients get equal shares of the engine."""
        self.metrics = SpeculationMetrics()
        self.drafted_tree = False
        self.token_ids = [*self.prompt, *resumed]
        self.committed: list[Node] = []
        self.blocks: list[Block] = []
        self.reserved = 0
        self.cached = 0
        """Prompt tokens found in the prefix cache when the request was first computed."""
        self.tree: TokenTree
        self.resumed = len(resumed)
        """How many of the output's tokens came from an earlier run; they count as produced."""
        self.produced = self.resumed
        self.picks: dict[int, SampledToken] = {}
        self.finished: FinishReason | None = None
        self.undisturbed = True
        """Whether it has run alone and without a break so far, so that its speed is what speculation makes of it."""
        self.losses = 0
        """How many times a stage was lost since its latest token."""
        self.error = ""
        """Why it ended early, "" if it did not; begins with the field at fault."""
        self.awaits_grammar = False
        """Whether its rows have to wait because the stages are still compiling its grammar."""
        self._postponed: list[tuple[Node, bool]] = []
        """Nodes that the drafter could not answer for, and whether each had entered when it was asked."""
        self._postponed_under: Node | None = None

    @property
    def slots_needed(self) -> int:
        """Committed slots that it takes at most, if it shares none: those of its prompt and its output."""
        return len(self.prompt) + self.max_tokens

    @property
    def started(self) -> bool:
        """Whether it has any node; if not, it is waiting or has just been admitted."""
        return bool(self.committed)

    @property
    def is_new(self) -> bool:
        """Whether no token of its output has come from this engine yet."""
        return self.produced == self.resumed

    @property
    def prefilling(self) -> bool:
        """Whether tokens of ``token_ids`` still have to enter."""
        return len(self.committed) < len(self.token_ids)

    @property
    def private_nodes(self) -> list[Node]:
        """Committed nodes outside shared blocks, whose slots only this request holds."""
        return self.committed[len(self.blocks) * BLOCK :]

    @property
    def has_slot(self) -> bool:
        """Whether a slot is reserved for one more committed token."""
        return len(self.committed) - len(self.blocks) * BLOCK < self.reserved

    def take_prefill_chunk(self, nodes: Nodes, most: int) -> list[Node]:
        """Make nodes for up to ``most`` further tokens of ``token_ids``; the node of the last token becomes the root.

        If more tokens follow, the chunk ends at a block's end where it can, so that the block can be shared.
        """
        first = len(self.committed)
        last = first + most
        if last < len(self.token_ids):
            # Down to a block's end, but no shorter than one block, or than ``most`` if that is less.
            last = max(last // BLOCK * BLOCK, min(last, first + BLOCK))
        for position in range(first, min(last, len(self.token_ids))):
            self.committed.append(nodes.committed(self.token_ids[position], position))
        if not self.prefilling:
            self.tree = TokenTree(self.committed[-1], nodes)
        return self.committed[first:]

    def attach_block(self, block: Block) -> None:
        """Continue after a block that others have computed, or whose rows enter before this request's."""
        assert len(self.committed) == len(self.blocks) * BLOCK
        self.blocks.append(block)
        # Nodes of its own: requests that share a block must not share the links of their trees.
        self.committed += [replace(node, children={}) for node in block.nodes]
        if self.is_new:
            self.cached = min(len(self.committed), len(self.prompt))

    def reset_for_recompute(self) -> None:
        """Drop all nodes, to start again from the tokens committed so far."""
        for node in self.committed:
            node.alive = node.open = False
        # Set first: ``tokens`` reads the nodes that are dropped next.
        self.token_ids = self.tokens
        self.committed, self.blocks, self.picks, self.reserved = [], [], {}, 0
        self.drafted_tree, self._postponed, self.undisturbed = False, [], False

    @property
    def tokens(self) -> list[int]:
        """The tokens of the prompt and of the output so far."""
        return self.token_ids if self.prefilling else [node.token for node in self.committed]

    def postpone(self, node: Node, entered: bool) -> None:
        """Ask the drafter about ``node`` again under another root, or once it has entered: it had no answer now.

        ``entered`` is whether the node had entered when the drafter was asked; it may have since.
        """
        self._postponed.append((node, entered))
        self._postponed_under = self.tree.root

    def take_postponed(self) -> list[Node]:
        """The nodes to ask about again: all of them if the root has moved, else those that have entered since."""
        if not self._postponed:
            return []
        moved = self._postponed_under is not self.tree.root
        live = [(n, had) for n, had in self._postponed if n.open]
        self._postponed = [] if moved else [(node, had) for node, had in live if had or not node.entered]
        return [node for node, had in live if moved or (node.entered and not had)]

    def path(self, node: Node) -> list[int]:
        """Token ids from the prompt's first to that of ``node``, which is in the tree."""
        return [committed.token for committed in self.committed] + self.path_below_root(node)

    def path_below_root(self, node: Node) -> list[int]:
        """Token ids from the root's child down to ``node``; empty for the root itself."""
        above: list[int] = []
        current: Node | None = node
        while current is not None and current is not self.tree.root:
            above.append(current.token)
            current = current.parent
        return above[::-1]

    def end_of(self, token: int) -> FinishReason | None:
        """Why the request is over with this committed token, its text aside; None if it is not."""
        if token in self.stop_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if self.produced >= self.max_tokens else None
