"""Prefix cache: blocks of committed rows that later requests with the same beginning need not compute again.

A block is ``BLOCK`` consecutive tokens with their slots; it follows another block, or stands at the beginning. Blocks
are found by the block that they follow and by their tokens, not by a hash: two texts whose hashes collide are never
confused. (vLLM's automatic prefix caching hashes the chain; here the chain itself is the key of a dict.)

Requests hold references. A block without references stays until its slots are needed. The block released first is
evicted first, and within a request the last block first, so that no block outlives the one that it follows. Blocks of a
pinned text are evicted after all others: a beginning common to many requests outlasts the requests between.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from penstock.core import PenstockError
from penstock.tree import Node

BLOCK: Final = 16
"""Tokens of one block, as in vLLM."""
MOST_PINS: Final = 64
"""Most texts that are pinned at a time; a further one replaces the oldest."""


@dataclass(eq=False)
class Block:
    """A block of the cache. Its ``nodes`` are committed and enter every stream before a later holder's rows."""

    number: int
    before: int
    nodes: tuple[Node, ...]
    holders: int = 0
    pinned: bool = False

    @property
    def key(self) -> tuple[int, tuple[int, ...]]:
        return self.before, tuple(node.token for node in self.nodes)


class PrefixCache:
    """The cache of all blocks, held or not."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, tuple[int, ...]], Block] = {}
        self._unheld: dict[int, Block] = {}
        """Blocks without holders by number, in the order of eviction."""
        self._unheld_pinned: dict[int, Block] = {}
        """Pinned blocks without holders, in the order of eviction; they are evicted after all others."""
        self._pins: dict[tuple[int, ...], None] = {}
        """Pinned texts, cut to whole blocks; the oldest comes first."""
        self._made = 0

    @property
    def unheld_slots(self) -> int:
        """Slots of blocks without holders."""
        return (len(self._unheld) + len(self._unheld_pinned)) * BLOCK

    @property
    def held_slots(self) -> int:
        return len(self._known) * BLOCK - self.unheld_slots

    def find(self, before: Block | None, tokens: Sequence[int]) -> Block | None:
        """The block of these ``BLOCK`` tokens after ``before`` (None: at the beginning); None if it is unknown."""
        return self._known.get((before.number if before else 0, tuple(tokens)))

    def chain(self, tokens: Sequence[int]) -> Iterator[Block]:
        """The known blocks of a text, from its beginning, without its last token, which has to be computed."""
        before = None
        for first in range(0, len(tokens) - BLOCK, BLOCK):
            before = self.find(before, tokens[first : first + BLOCK])
            if before is None:
                return
            yield before

    def pin(self, tokens: Sequence[int]) -> None:
        """Pin the whole blocks of a text, present and future ones: they are evicted last."""
        text = tuple(tokens[: len(tokens) // BLOCK * BLOCK])
        if not text or text in self._pins:
            return
        if len(self._pins) == MOST_PINS:
            del self._pins[next(iter(self._pins))]
        self._pins[text] = None
        # The added 0 makes ``chain`` find the last block, too; it never returns a text's last token.
        known = list(self.chain([*text, 0]))
        # In reverse, so that a block is evicted before the one that it follows.
        for block in reversed(known):
            block.pinned = True
            if self._unheld.pop(block.number, None) is not None:
                self._unheld_pinned[block.number] = block

    def add(self, before: Block | None, nodes: Sequence[Node]) -> Block | None:
        """A new block, held once; None if the same tokens are already known or are not a whole block."""
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
        """Release a request's blocks, which are given in the order of its text."""
        # In reverse, so that a block is evicted before the one that it follows.
        for block in reversed(blocks):
            if block.holders <= 0:
                raise PenstockError(f"block {block.number} of the prefix cache was let go more often than held")
            block.holders -= 1
            if not block.holders:
                self._unheld_of(block)[block.number] = block

    def evict(self) -> list[int]:
        """Remove the block that has been without holders for longest, and return its slots. There must be one."""
        # Pinned blocks go only once no others are left.
        unheld = self._unheld or self._unheld_pinned
        block = unheld.pop(next(iter(unheld)))
        del self._known[block.key]
        return [node.slot for node in block.nodes]

    def _unheld_of(self, block: Block) -> dict[int, Block]:
        return self._unheld_pinned if block.pinned else self._unheld

    def _is_pinned(self, block: Block) -> bool:
        """Whether a block, which follows a pinned one or none, continues a pinned text."""
        first = block.nodes[0].position
        return any(pin[first : first + BLOCK] == block.key[1] for pin in self._pins)


def settled(node: Node) -> Node:
    """A copy of the node for later holders of its block: committed, computed, without parent and children."""
    return Node(node.id, node.token, node.position, node.slot, entered=True, stream=node.stream)
