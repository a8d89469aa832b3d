"""Blocks that requests share: found by their whole text, held while anybody needs them, gone when their room is."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core import PenstockError
from penstock.requests.slots import BLOCK, MOST_PINS, Block, PrefixCache, SlotPool, block_hashes, chained
from penstock.tree import Node


def nodes(tokens: list[int], first: int = 0) -> list[Node]:
    return [Node(1000 + first + i, token, first + i, first + i) for i, token in enumerate(tokens)]


def chain(cache: PrefixCache, text: list[int]) -> list[Block]:
    """All whole blocks of a text."""
    blocks: list[Block] = []
    for first in range(0, len(text) - BLOCK + 1, BLOCK):
        block = cache.add(blocks[-1] if blocks else None, nodes(text[first : first + BLOCK], first))
        assert block is not None
        blocks.append(block)
    return blocks


def test_a_text_finds_the_blocks_of_its_beginning_and_leaves_a_token_to_compute() -> None:
    cache = PrefixCache()
    text = list(range(3 * BLOCK))
    blocks = chain(cache, text)
    assert list(cache.chain([*text, 7])) == blocks
    assert list(cache.chain(text)) == blocks[:2]
    assert list(cache.chain([*text[: 2 * BLOCK], *[5] * BLOCK])) == blocks[:2]
    assert list(cache.chain([9, *text])) == []


def test_the_same_tokens_after_another_beginning_are_another_block() -> None:
    cache = PrefixCache()
    one, other, tail = [1] * BLOCK, [2] * BLOCK, [3] * BLOCK
    chain(cache, one + tail)
    (block,) = chain(cache, other)
    assert list(cache.chain([*other, *tail, 0])) == [block]


def test_what_is_there_is_not_added_twice() -> None:
    cache = PrefixCache()
    chain(cache, [1] * BLOCK)
    assert cache.add(None, nodes([1] * BLOCK)) is None


def test_blocks_that_nobody_holds_go_in_the_order_in_which_they_were_let_go_the_last_of_a_text_first() -> None:
    cache = PrefixCache()
    old, new = chain(cache, [1] * 2 * BLOCK), chain(cache, [2] * BLOCK)
    cache.let_go(old)
    cache.let_go(new)
    cache.hold(old[0])
    assert cache.unheld_slots == 2 * BLOCK
    assert cache.evict() == [node.slot for node in old[1].nodes]
    assert cache.evict() == [node.slot for node in new[0].nodes]
    assert (cache.held_slots, cache.unheld_slots) == (BLOCK, 0)


def test_letting_go_more_often_than_held_is_an_error() -> None:
    cache = PrefixCache()
    blocks = chain(cache, [1] * BLOCK)
    cache.let_go(blocks)
    with pytest.raises(PenstockError, match="more often"):
        cache.let_go(blocks)


def test_a_reservation_makes_blocks_that_nobody_holds_give_way() -> None:
    pool = SlotPool(3 * BLOCK, 0)
    assert pool.reserve(2 * BLOCK)
    taken = [Node(i, i, i, pool.take_committed()) for i in range(2 * BLOCK)]
    first = pool.share(None, taken[:BLOCK])
    second = pool.share(first, taken[BLOCK:])
    assert first is not None
    assert second is not None
    assert not pool.reserve(BLOCK + 1)
    pool.cache.let_go([first, second])
    assert pool.reserve(BLOCK + 1)
    assert (pool.used, pool.cached) == (BLOCK, BLOCK) if first.holders else (0, BLOCK)
    assert list(pool.cache.chain([node.token for node in taken])) == [first]
    pool.audit(0, 0)


@given(st.integers(0, 2**32))
def test_no_block_outlives_the_one_that_it_follows(seed: int) -> None:
    rng = random.Random(seed)
    cache, held = PrefixCache(), []
    for _ in range(60):
        if rng.random() < 0.5:
            text = [rng.randrange(2) for _ in range(3)]
            blocks: list[Block] = []
            for first, token in enumerate(text):
                before = blocks[-1] if blocks else None
                block = cache.find(before, [token] * BLOCK)
                if block is None:
                    block = cache.add(before, nodes([token] * BLOCK, first * BLOCK))
                    assert block is not None
                else:
                    cache.hold(block)
                blocks.append(block)
            held.append(blocks)
        elif held and rng.random() < 0.6:
            cache.let_go(held.pop(rng.randrange(len(held))))
        elif cache.unheld_slots:
            cache.evict()
        numbers = {block.number for block in cache._known.values()} | {0}
        assert all(block.before in numbers for block in cache._known.values())
        assert cache.held_slots == BLOCK * len({block.number for blocks in held for block in blocks})


def test_pinned_blocks_go_after_all_others_whether_they_were_there_when_they_were_pinned_or_came_later() -> None:
    cache = PrefixCache()
    there, other = chain(cache, [1] * 2 * BLOCK), chain(cache, [2] * BLOCK)
    cache.let_go(there)
    cache.let_go(other)
    cache.pin([1] * 2 * BLOCK + [9])
    cache.pin([3] * BLOCK)
    later = chain(cache, [3] * BLOCK + [4] * BLOCK)
    cache.let_go(later)
    gone = [cache.evict()[0] for _ in range(5)]
    in_order = [other[0], later[1], there[1], there[0], later[0]]
    assert gone == [block.nodes[0].slot for block in in_order]
    assert cache.unheld_slots == cache.held_slots == 0


def test_a_pinned_block_that_is_held_again_is_not_evicted() -> None:
    cache = PrefixCache()
    cache.pin([1] * BLOCK)
    pinned, other = chain(cache, [1] * BLOCK), chain(cache, [2] * BLOCK)
    cache.let_go(pinned)
    cache.hold(pinned[0])
    cache.let_go(other)
    assert cache.evict() == [node.slot for node in other[0].nodes]
    assert (cache.held_slots, cache.unheld_slots) == (BLOCK, 0)


def test_less_than_a_block_is_not_pinned_and_the_oldest_pin_gives_way() -> None:
    cache = PrefixCache()
    cache.pin([1] * (BLOCK - 1))
    cache.pin([5] * BLOCK)
    for token in range(100, 100 + MOST_PINS):
        cache.pin([token] * BLOCK)
    oldest, kept, short = (chain(cache, [token] * BLOCK)[0] for token in (5, 100, 1))
    assert (oldest.pinned, kept.pinned, short.pinned) == (False, True, False)


def test_blocks_of_a_pin_that_gives_way_are_evicted_as_others_are() -> None:
    cache = PrefixCache()
    cache.pin([5] * 2 * BLOCK)
    both = [5] * BLOCK + [6] * BLOCK
    cache.pin(both)
    shared, own = chain(cache, [5] * 2 * BLOCK)
    held = cache.add(shared, nodes(both[BLOCK:], BLOCK))
    assert held is not None
    cache.let_go([shared, own])
    for token in range(100, 99 + MOST_PINS):
        cache.pin([token] * BLOCK)
    assert (shared.pinned, own.pinned, held.pinned) == (True, False, True), "another pinned text has the first block"
    cache.pin([200] * BLOCK)
    assert (shared.pinned, own.pinned, held.pinned) == (False, False, False)
    assert cache.unheld_slots == 2 * BLOCK
    assert [cache.evict()[0] for _ in range(2)] == [own.nodes[0].slot, shared.nodes[0].slot]


def test_a_block_is_pinned_only_after_what_its_pinned_text_has_before_it() -> None:
    cache = PrefixCache()
    cache.pin([1] * BLOCK + [2] * BLOCK)
    cache.pin([3] * BLOCK + [4] * BLOCK)
    assert [block.pinned for block in chain(cache, [1] * BLOCK + [4] * BLOCK)] == [True, False]


def test_the_hashes_of_a_prompt_are_those_of_its_blocks() -> None:
    text = list(range(2 * BLOCK + 1))
    first = chained(0, text[:BLOCK])
    assert list(block_hashes(text)) == [first, chained(first, text[BLOCK : 2 * BLOCK])]
    assert list(block_hashes(text[:-1])) == [first], "a text's last token is always computed"
