"""Plans the pieces in which a prompt enters a pipeline of modelled stages, so that its first token is there soonest.

Short pieces keep all stages busy early, but each costs a stage's overhead and one more reading of its weights. As
attention grows along a text, pieces that take equally long get shorter. Therefore pieces of equal time are tried, for
many such times, and pieces of equal length; the ends of the best ones are then moved by some blocks while that helps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import combinations, pairwise
from typing import Final

from penstock.cluster.timing import BATCH_ROWS, LinkTiming, StageTiming, chunk

BLOCK: Final = 16
"""Tokens of a block of the prefix cache. The length of every piece but the last one is a multiple of it."""
HEADER_BYTES: Final = 300
"""Bytes of a message's header beside ``HEADER_ROW_BYTES`` for each row."""
HEADER_ROW_BYTES: Final = 20
"""Bytes of a batch's header, and of each row in it."""
FEW: Final = 8
"""Blocks up to which all cuts are tried: eight have 128."""
TIMES: Final = 24
"""How many times per piece are tried, from that of a block to that of the longest piece."""
WORK: Final = 60_000
"""Bound on the search: how many passes of a piece through a stage it may compute."""
MOVES: Final = 150
"""Most changes to the pieces that the search looks at."""
REMEMBERED: Final = 4096
"""Most texts whose pieces a table remembers; the one that was asked for longest ago goes first."""

Ends = tuple[int, ...]
"""The number of the text's tokens at which each piece ends."""


class Flow:
    """Pieces on their way: a stage works on one, its neighbour's buffer holds one, and each link carries one."""

    def __init__(self, stages: Sequence[StageTiming], links: Sequence[LinkTiming]) -> None:
        self._stages = stages
        self._links = links
        self._stage_s = lru_cache(maxsize=1 << 17)(self._seconds)

    def _seconds(self, stage: int, rows: int, cached: int) -> float:
        return self._stages[stage].seconds(rows, chunk(rows, cached))

    @property
    def stages(self) -> int:
        return len(self._stages)

    def slowest_s(self, rows: int, cached: int) -> float:
        """Seconds of the slowest stage for ``rows`` tokens behind ``cached`` ones."""
        return max(self._stage_s(stage, rows, cached) for stage in range(self.stages))

    def first_token_s(self, begin: int, ends: Sequence[int]) -> float:
        """Seconds until the last piece has come out of the last stage, and its result has reached the engine.

        A stage says that its buffer is free when it begins a piece, which takes the link's latency to arrive. Its
        output leaves once the next stage has said so, and only then does it begin another piece.
        """
        links, stages = self._links, self.stages
        free = [0.0] * (stages + 1)  # when the buffer before each stage is known to be free; the engine's always is
        left = [0.0] * stages  # when the latest output of each stage began to leave it
        sent = [0.0] * len(links)  # when the last byte of the latest piece has entered each link
        at = 0.0
        for first, last in pairwise((begin, *ends)):
            rows, at = last - first, free[0]
            for i in range(stages):
                link = links[i]
                sent[i] = max(at, sent[i]) + link.seconds(rows, header_bytes(rows, i)) - link.latency_s
                start = max(sent[i] + link.latency_s, left[i])
                free[i] = start + link.latency_s
                at = left[i] = max(start + self._stage_s(i, rows, first), free[i + 1])
        return at + links[-1].seconds(1)


def header_bytes(rows: int, hop: int) -> int:
    """Bytes beside the hidden states. To the first stage the rows are in the header, and the link prices them."""
    return HEADER_BYTES + (HEADER_ROW_BYTES * rows if hop else 0)


class PieceTable:
    """The pieces of any text behind any cached part of it, for one pipeline; planned when they are first asked for.

    ``known`` holds those that have been planned, by the text's tokens and how many of them are cached.
    """

    def __init__(
        self,
        stages: Sequence[StageTiming],
        links: Sequence[LinkTiming],
        most: int = BATCH_ROWS,
        known: Mapping[tuple[int, int], Ends] | None = None,
    ) -> None:
        self._flow = Flow(stages, links)
        self._most = most
        self._known = dict(known or {})
        self.reckoned = 0
        """How many texts were planned here, and were not among the ``known`` ones."""

    @property
    def known(self) -> Mapping[tuple[int, int], Ends]:
        """The planned pieces, in the order in which they were last asked for."""
        return self._known

    def ends(self, tokens: int, cached: int = 0) -> Ends:
        """Ends of the pieces that follow a text's ``cached`` first tokens, as numbers of the text's tokens.

        Texts of over 1,024 tokens whose lengths differ by less than 1 in 32 may be cut alike.
        """
        # Lengths are rounded up to a multiple of the step, so that fewer different texts have to be planned.
        step = BLOCK
        while step * 64 < tokens:
            step *= 2
        text = -(-tokens // step) * step, cached
        planned = self._known.pop(text, None)
        if planned is None:
            planned = best_ends(self._flow, cached, text[0], self._most)
            self.reckoned += 1
            if len(self._known) == REMEMBERED:
                del self._known[next(iter(self._known))]
        self._known[text] = planned  # at the end again: the dict is in the order of use
        return (*(end for end in planned if end < tokens), tokens)


def best_ends(flow: Flow, begin: int, tokens: int, most: int) -> Ends:
    """The pieces from ``begin`` on that give the first token soonest: of all cuts, or of those that a search finds."""
    if tokens - begin <= FEW * BLOCK:
        return min(every_cut(begin, tokens, most), key=lambda ends: flow.first_token_s(begin, ends))
    ways = dict.fromkeys([*equal_lengths(begin, tokens, most), *equal_times(flow, begin, tokens, most)])
    best = min(ways, key=lambda ends: flow.first_token_s(begin, ends))
    return moved_about(flow, begin, best, most)


def every_cut(begin: int, tokens: int, most: int) -> Iterator[Ends]:
    """All ways to cut at ends of blocks into pieces of at most ``most`` tokens."""
    blocks = range(begin + BLOCK, tokens, BLOCK)
    for count in range(len(blocks) + 1):
        for cuts in combinations(blocks, count):
            if all(end - first <= most for first, end in pairwise((begin, *cuts, tokens))):
                yield (*cuts, tokens)


def equal_lengths(begin: int, tokens: int, most: int) -> Iterator[Ends]:
    length = BLOCK
    while length <= most:
        yield (*range(begin + length, tokens, length), tokens)
        length *= 2


def equal_times(flow: Flow, begin: int, tokens: int, most: int) -> Iterator[Ends]:
    """Pieces that all take the slowest stage about the same time, as far as blocks allow: one cut for each of TIMES."""
    shortest, longest = flow.slowest_s(BLOCK, begin), flow.slowest_s(most, max(begin, tokens - most))
    for i in range(TIMES):
        limit = shortest * (longest / shortest) ** (i / (TIMES - 1))  # geometric steps
        ends, done = list[int](), begin
        while done < tokens:
            done = min(tokens, done + rows_within(flow, done, limit, most))
            ends.append(done)
        yield tuple(ends)


def rows_within(flow: Flow, cached: int, limit: float, most: int) -> int:
    """Tokens of the most blocks that the slowest stage can compute within ``limit`` seconds, at least of one block."""
    low, high = 1, most // BLOCK
    while low < high:
        middle = (low + high + 1) // 2
        if flow.slowest_s(middle * BLOCK, cached) <= limit * (1 + 1e-9):
            low = middle
        else:
            high = middle - 1
    return low * BLOCK


def moved_about(flow: Flow, begin: int, ends: Ends, most: int) -> Ends:
    """The pieces after changes (``changes``), one at a time, as long as one helps."""
    least = flow.first_token_s(begin, ends)
    left = min(MOVES, WORK // (len(ends) * flow.stages))
    better = True
    while better and left > 0:
        better = False
        for changed in changes(begin, ends, most):
            left -= 1
            if left < 0:
                break
            if (found := flow.first_token_s(begin, changed)) < least * (1 - 1e-9):
                ends, least, better = changed, found, True
                break
    return ends


def changes(begin: int, ends: Ends, most: int) -> Iterator[Ends]:
    """Changed pieces: one piece halved, or an end but the last moved by some blocks or removed, none too long."""
    for i, (before, end) in enumerate(pairwise((begin, *ends))):
        if end - before > BLOCK:
            middle = before + max(1, (end - before) // (2 * BLOCK)) * BLOCK
            yield (*ends[:i], middle, *ends[i:])
    for i, end in enumerate(ends[:-1]):
        before, after = (ends[i - 1] if i else begin), ends[i + 1]
        for blocks in (-4, -1, 1, 4):
            moved = end + blocks * BLOCK
            if before < moved < after and max(moved - before, after - moved) <= most:
                yield (*ends[:i], moved, *ends[i + 1 :])
        if after - before <= most:
            yield (*ends[:i], *ends[i + 1 :])
