"""Blocks of committed rows that later requests with the same beginning need not compute again.

A block is ``BLOCK`` tokens in a row, by their slots; it follows another one, or stands at the beginning. Blocks are
found by the block they follow and their tokens, so that what is found is what was computed, and nothing that merely
hashes alike (vLLM's automatic prefix caching hashes the chain; here the chain itself is the key of a dict).

Requests hold references. A block that nobody holds any more stays until its slots are wanted: the one that was let go
first goes first, and of one request's blocks the last, so that no block ever outlives the one that it follows. Those of
a pinned text go after all others: what every request of some kind begins with outlasts whatever comes between two.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from penstock.core import PenstockError
from penstock.tree import Node

BLOCK: Final = 16
"""Tokens of one block; vLLM's block size."""
MOST_PINS: Final = 64
"""Texts that are pinned at a time; a further one takes the place of the oldest."""


@dataclass(eq=False)
class Block:
    """``nodes`` are committed and have entered every pipeline's stream before anybody who is given the block."""

    number: int
    before: int
    nodes: tuple[Node, ...]
    holders: int = 0
    pinned: bool = False

    @property
    def key(self) -> tuple[int, tuple[int, ...]]:
        return self.before, tuple(node.token for node in self.nodes)


class PrefixCache:
    """All blocks, held or not."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, tuple[int, ...]], Block] = {}
        self._unheld: dict[int, Block] = {}
        """By number, in the order in which they are to go."""
        self._unheld_pinned: dict[int, Block] = {}
        """Likewise, once none of the others is left."""
        self._pins: dict[tuple[int, ...], None] = {}
        """Whole blocks, the oldest text first."""
        self._made = 0

    @property
    def unheld_slots(self) -> int:
        """Slots of blocks that nobody holds."""
        return (len(self._unheld) + len(self._unheld_pinned)) * BLOCK

    @property
    def held_slots(self) -> int:
        return len(self._known) * BLOCK - self.unheld_slots

    def find(self, before: Block | None, tokens: Sequence[int]) -> Block | None:
        """The block of these ``BLOCK`` tokens after ``before``, or at the beginning."""
        return self._known.get((before.number if before else 0, tuple(tokens)))

    def chain(self, tokens: Sequence[int]) -> Iterator[Block]:
        """The blocks that are there of a text, from its beginning; at least its last token is in none."""
        before = None
        for first in range(0, len(tokens) - BLOCK, BLOCK):
            before = self.find(before, tokens[first : first + BLOCK])
            if before is None:
                return
            yield before

    def pin(self, tokens: Sequence[int]) -> None:
        """Keep the whole blocks of a text, those that are still to come too, for as long as any other could go."""
        text = tuple(tokens[: len(tokens) // BLOCK * BLOCK])
        if not text or text in self._pins:
            return
        if len(self._pins) == MOST_PINS:
            del self._pins[next(iter(self._pins))]
        self._pins[text] = None
        known = list(self.chain([*text, 0]))
        for block in reversed(known):
            block.pinned = True
            if self._unheld.pop(block.number, None) is not None:
                self._unheld_pinned[block.number] = block

    def add(self, before: Block | None, nodes: Sequence[Node]) -> Block | None:
        """A new block, held once; None if the same tokens are there already, or what they follow is unknown."""
        number = before.number if before else 0
        self._made += 1
        block = Block(self._made, number, tuple(map(settled, nodes)), holders=1)
        if len(nodes) != BLOCK or block.key in self._known:
            return None
        block.pinned = (before is None or before.pinned) and self._is_pinned(block)
        self._known[block.key] = block
        return block

    def hold(self, block: Block) -> None:
        block.holders += 1
        self._unheld_of(block).pop(block.number, None)

    def let_go(self, blocks: Sequence[Block]) -> None:
        """A request's blocks, in the order of its text."""
        for block in reversed(blocks):
            if block.holders <= 0:
                raise PenstockError(f"block {block.number} of the prefix cache was let go more often than held")
            block.holders -= 1
            if not block.holders:
                self._unheld_of(block)[block.number] = block

    def evict(self) -> list[int]:
        """Forget the block that nobody has held for longest and return its slots. Call only if there is one."""
        unheld = self._unheld or self._unheld_pinned
        block = unheld.pop(next(iter(unheld)))
        del self._known[block.key]
        return [node.slot for node in block.nodes]

    def _unheld_of(self, block: Block) -> dict[int, Block]:
        return self._unheld_pinned if block.pinned else self._unheld

    def _is_pinned(self, block: Block) -> bool:
        """Whether a block that follows a pinned one, or none, has a pinned text's next tokens."""
        first = block.nodes[0].position
        return any(pin[first : first + BLOCK] == block.key[1] for pin in self._pins)


def settled(node: Node) -> Node:
    """The node as whoever is given its block sees it: committed, computed, and nothing below or above it."""
    return Node(node.id, node.token, node.position, node.slot, entered=True, stream=node.stream)
