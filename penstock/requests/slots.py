"""Slots of the KV cache, and the prefix cache over those of finished requests."""

from __future__ import annotations

import heapq
import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from typing import Final

from penstock.core import PenstockError
from penstock.tree import Node

# --------------------------------------------------------------------------------------------------------- prefix cache
# Blocks of committed rows that later requests with the same beginning need not compute again.
#
# A block is ``BLOCK`` consecutive tokens with their slots; it follows another block, or stands at the beginning. Blocks
# are found by the block that they follow and by their tokens, not by a hash: two texts whose hashes collide are never
# confused. (vLLM's automatic prefix caching hashes the chain; here the chain itself is the key of a dict.)
#
# Requests hold references. A block without references stays until its slots are needed. The block released first is
# evicted first, and within a request the last block first, so that no block outlives the one that it follows. Blocks of
# a pinned text are evicted after all others: a beginning common to many requests outlasts the requests between.

BLOCK: Final = 16
"""Tokens of one block, as in vLLM."""
MOST_PINS: Final = 64
"""Number of texts that can be pinned at a time; a further one replaces the oldest. Pinned texts hold slots that no
request can have."""


@dataclass(eq=False)
class Block:
    """A block of the cache. Its ``BLOCK`` ``nodes`` are committed and enter every stream before a later holder's rows.

    ``before`` is the ``number`` of the block that it follows, 0 at the beginning of a text; ``holders`` counts the
    requests that use it; ``pinned`` blocks are evicted after all others.
    """

    number: int
    before: int
    nodes: tuple[Node, ...]
    hash: int
    """``chained`` of the text up to its end, by which others than the cache know it."""
    holders: int = 0
    pinned: bool = False

    @property
    def key(self) -> tuple[int, tuple[int, ...]]:
        """The key by which the cache finds it: the block before it and its tokens."""
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
        """Pinned texts as the hashes of their whole blocks; the oldest comes first."""
        self._pinned: Counter[int] = Counter()
        """Number of pinned texts that have the block of a hash."""
        self._made = 0
        """Number of the block made last. Numbers are not reused, so a key never leads to the wrong predecessor."""

    @property
    def unheld_slots(self) -> int:
        """Slots of blocks without holders."""
        return (len(self._unheld) + len(self._unheld_pinned)) * BLOCK

    @property
    def held_slots(self) -> int:
        """Slots of blocks that at least one request holds, each counted once."""
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

    def length(self, tokens: Sequence[int]) -> int:
        """The number of a text's first tokens that the cache holds. It only reads, so any thread may call it."""
        return BLOCK * sum(1 for _ in self.chain(tokens))

    def hashes(self, most: int) -> list[int]:
        """Hashes of the blocks, newest first, at most ``most`` of them."""
        return [block.hash for block in islice(reversed(self._known.values()), most)]

    def pin(self, tokens: Sequence[int]) -> None:
        """Pin the whole blocks of a text, present and future ones: they are evicted last.

        Prompts that ask for outlines are pinned: Jupiter (section V-B) computes its directives ahead and keeps them in
        the KV cache.
        """
        # The added 0 stands for the last token, which neither hashes nor chains include.
        text = [*tokens, 0]
        hashes = tuple(block_hashes(text))
        if not hashes or hashes in self._pins:
            return
        if len(self._pins) == MOST_PINS:
            self._unpin(next(iter(self._pins)))
        self._pins[hashes] = None
        self._pinned.update(hashes)
        # In reverse, so that a block is evicted before the one that it follows.
        for block in reversed(list(self.chain(text))):
            block.pinned = True
            if self._unheld.pop(block.number, None) is not None:
                self._unheld_pinned[block.number] = block

    def _unpin(self, hashes: tuple[int, ...]) -> None:
        """Have the blocks of a pinned text be evicted as others are, unless another pinned text has them, too."""
        del self._pins[hashes]
        self._pinned -= Counter(hashes)
        for block in self._known.values():
            block.pinned = block.hash in self._pinned
        # In the order of eviction, in which a block stands before the one that it follows.
        for number, block in list(self._unheld_pinned.items()):
            if not block.pinned:
                self._unheld[number] = self._unheld_pinned.pop(number)

    def add(self, before: Block | None, nodes: Sequence[Node]) -> Block | None:
        """Make a block of these nodes, held once. None if the cache has their tokens or they are not a whole block.

        Where another request's block has the same tokens, the caller keeps its own copy: two requests that computed the
        same rows at the same time each go on with their own slots.
        """
        number = before.number if before else 0
        self._made += 1
        text = chained(before.hash if before else 0, [node.token for node in nodes])
        block = Block(self._made, number, tuple(map(settled, nodes)), text, holders=1)
        if len(nodes) != BLOCK or block.key in self._known:
            return None
        block.pinned = block.hash in self._pinned
        self._known[block.key] = block
        return block

    def hold(self, block: Block) -> None:
        """Count one more holder, so that the block cannot be evicted."""
        block.holders += 1
        self._unheld_of(block).pop(block.number, None)

    def let_go(self, blocks: Sequence[Block]) -> None:
        """Release a request's blocks, which are given in the order of its text.

        Raises PenstockError for a block that nobody holds.
        """
        # In reverse, so that a block is evicted before the one that it follows.
        for block in reversed(blocks):
            if block.holders <= 0:
                raise PenstockError(f"block {block.number} of the prefix cache was let go more often than held")
            block.holders -= 1
            if not block.holders:
                self._unheld_of(block)[block.number] = block

    def evict(self) -> list[int]:
        """Remove the block that has been without holders for longest, unless it is pinned, and return its slots.

        There must be one.
        """
        # Pinned blocks go only once no others are left.
        unheld = self._unheld or self._unheld_pinned
        block = unheld.pop(next(iter(unheld)))  # a dict's first key is the one that was inserted first
        del self._known[block.key]
        return [node.slot for node in block.nodes]

    def _unheld_of(self, block: Block) -> dict[int, Block]:
        return self._unheld_pinned if block.pinned else self._unheld


def chained(before: int, tokens: Sequence[int]) -> int:
    """A hash of 63 bits of a block's tokens after the text whose hash is ``before`` (0: at the beginning).

    It is the same in every process. Texts that share one only look alike to whoever routes requests.
    """
    packed = struct.pack(f"<Q{len(tokens)}Q", before, *tokens)
    return int.from_bytes(blake2b(packed, digest_size=8).digest(), "little") >> 1


def block_hashes(tokens: Sequence[int]) -> Iterator[int]:
    """The hash of each block of a prompt that a prefix cache may hold, from its beginning: see ``chain``."""
    text = 0
    for first in range(0, len(tokens) - BLOCK, BLOCK):
        text = chained(text, tokens[first : first + BLOCK])
        yield text


def settled(node: Node) -> Node:
    """A copy of the node for later holders of its block: committed, computed, without parent and children."""
    return Node(node.id, node.token, node.position, node.slot, entered=True, stream=node.stream)


# ---------------------------------------------------------------------------------------------------------------- slots
# The pool of KV slots that all requests share. Slot numbers are the same on every stage and in the drafter.

LEAST_SPECULATIVE: Final = 1024
"""Lower limit of the default number of slots for drafted rows. A strategy of narrow batches would else have room for
hardly more than one request's tree."""
AHEAD: Final = 4
"""Batches of drafted nodes beyond one per stage: those on the links, and those that have yet to enter.

In simulations of the presets with the default strategy at its full width, the largest tree had 3.4 such batches."""


def speculative_slots(stages: int, most_rows: int) -> int:
    """Default number of speculative slots.

    A strategy whose widest batches, or trees, have ``most_rows`` rows can use that many over so many stages.
    """
    return max(LEAST_SPECULATIVE, most_rows * (stages + AHEAD))


class SlotPool:
    """The slots' accounting: free + committed + speculative + cached = total, always.

    Committed slots are reserved before they are taken: some when a request is admitted, more as it grows. With
    ``sharing``, the slots of a finished block may be shared; without holders they stay cached until a reservation needs
    the room. Speculation has its own quota on top. The lowest free slot is taken first, which keeps a request's slots
    close together (a stage can then read them without gathering).
    """

    def __init__(self, committed_capacity: int, speculative_quota: int, sharing: bool = True) -> None:
        self.committed_capacity = committed_capacity
        self.speculative_quota = speculative_quota
        self.total = committed_capacity + speculative_quota
        self.sharing = sharing
        self.cache = PrefixCache()
        self.reserved = 0
        """Committed slots that requests have reserved or hold alone, without those of held blocks."""
        self.committed = 0
        """Committed slots that are taken and in no block."""
        self.room = speculative_quota
        """Speculative slots that can still be taken."""
        # A heap, so that the smallest free slot is taken; ``_is_free`` finds a slot that is freed twice.
        self._free = list(range(self.total))
        self._is_free = [True] * self.total

    @property
    def speculative(self) -> int:
        """Speculative slots that are taken."""
        return self.speculative_quota - self.room

    @property
    def used(self) -> int:
        """Committed slots that are taken, with those of held blocks."""
        return self.committed + self.cache.held_slots

    @property
    def cached(self) -> int:
        """Slots of blocks without holders."""
        return self.cache.unheld_slots

    def reserve(self, count: int) -> bool:
        """Reserve ``count`` committed slots for a request; False if there are not as many.

        Blocks without holders are evicted as needed.
        """
        left = self.committed_capacity - self.reserved - self.cache.held_slots - count
        if left < 0:
            return False
        # ``left`` is the capacity beside reservations and held blocks: cached blocks may fill no more of it.
        while self.cache.unheld_slots > left:
            self._give_back(self.cache.evict())
        self.reserved += count
        return True

    def unreserve(self, count: int) -> None:
        """Give back reserved slots that have not been taken, or have been freed."""
        self.reserved -= count

    def take_committed(self) -> int:
        """Take the lowest free slot for a committed row. The caller has reserved it."""
        self.committed += 1
        return self._take()

    def take_speculative(self) -> int:
        """Take the lowest free slot for a drafted row. Raises PenstockError if ``room`` is 0."""
        if self.room <= 0:
            raise PenstockError("no speculative slot left: strategies must stay within the tree's room")
        self.room -= 1
        return self._take()

    def commit(self) -> None:
        """Count one speculative slot as committed; the slot itself stays in place."""
        # The walk has checked that the request has a reserved slot (``Request.has_slot``), so the committed slots stay
        # within what is reserved.
        self.room += 1
        self.committed += 1

    def free_committed(self, slots: Iterable[int]) -> None:
        """Free slots that one request holds alone. Raises PenstockError for a slot that is free already."""
        self.committed -= self._give_back(slots)

    def free_speculative(self, slots: Iterable[int]) -> None:
        """Free the slots of dead drafted rows. Raises PenstockError for a slot that is free already."""
        # At once, even while the row is in flight: stages compute in stream order, so whoever takes the slot next
        # writes it after the dead row.
        self.room += self._give_back(slots)

    def share(self, before: Block | None, nodes: Sequence[Node]) -> Block | None:
        """Make a block, held once, from a request's private slots; None if these tokens already have a block."""
        block = self.cache.add(before, nodes) if self.sharing else None
        if block is not None:
            # The slots now count as those of a held block, no longer as the request's own.
            self.committed -= BLOCK
            self.reserved -= BLOCK
        return block

    def forget_cached(self) -> None:
        """Free the slots of all cached blocks. None of them is held."""
        while self.cache.unheld_slots:
            self._give_back(self.cache.evict())

    def audit(self, committed: int, speculative: int) -> None:
        """Raise PenstockError unless the counts match the live requests and add up to the total.

        ``committed`` is the number of slots that requests hold alone.
        """
        shared = self.cache.held_slots + self.cached
        found = (len(self._free), self.committed, self.speculative)
        wanted = (self.total - committed - speculative - shared, committed, speculative)
        if found != wanted or self.committed > self.reserved or self.reserved + shared > self.committed_capacity:
            raise PenstockError(
                f"slots (free, committed, speculative) are {found}, the requests hold {wanted}; {self.reserved} "
                f"reserved and {shared} in blocks of {self.committed_capacity}"
            )

    def _take(self) -> int:
        slot = heapq.heappop(self._free)
        self._is_free[slot] = False
        return slot

    def _give_back(self, slots: Iterable[int]) -> int:
        count = 0
        for slot in slots:
            if self._is_free[slot]:
                raise PenstockError(f"slot {slot} was freed twice")
            self._is_free[slot] = True
            heapq.heappush(self._free, slot)
            count += 1
        return count
