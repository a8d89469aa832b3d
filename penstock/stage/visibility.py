"""The slots that each row of a batch sees, and the near slots that layers with a window read."""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import or_
from typing import Final

import numpy as np

from penstock.core import PenstockError
from penstock.messages import MOST, NO_SLOT, Batch

# ----------------------------------------------------------------------------------------------------------- visibility
# The slots that each row of a batch sees: the part of a stage on which all replicas must agree. No torch here.


class ProtocolError(PenstockError):
    """A batch that contradicts earlier ones of its stream, or that no layers can have made.

    It ends the session's pipeline. Whoever has sent the batch is at fault, not the stage that notices.
    """


class FeaturesError(PenstockError):
    """Features that are not for this stage, or not as its layers read them. They end the session's pipeline."""


@dataclass(frozen=True)
class RequestView:
    """The slots that the rows of one request see in one batch.

    ``rows``      [n]     indices into the surviving rows of the batch
    ``slots``     [S]     the slots that at least one of them sees, committed ones first, in position order
    ``positions`` [S]     the position that each of these slots holds
    ``mask``      [n, S]  True where the row sees the slot (its ancestors, its committed prefix, itself)
    ``committed``         how many of the slots, from the first on, are committed
    """

    request: int
    rows: np.ndarray
    slots: np.ndarray
    positions: np.ndarray
    mask: np.ndarray
    committed: int = 0


@dataclass(frozen=True)
class BatchView:
    """The surviving rows of a batch, and what each request among them sees.

    ``requests``, ``nodes``, ``slots``, ``positions`` and ``tokens`` are int64 [N], an entry per surviving row.
    """

    requests: np.ndarray
    nodes: np.ndarray
    slots: np.ndarray
    positions: np.ndarray
    tokens: np.ndarray
    views: Sequence[RequestView]
    parents: np.ndarray
    """The slot of each row's parent [N]."""
    levels: np.ndarray | None = None
    """The feature level of each row [N], for a drafter whose rows read different levels; None for others."""
    slot_tokens: np.ndarray | None = None
    """The token in each slot of the stage, valid until the next batch."""
    closed: Sequence[int] = ()
    """Requests that have ended since the last view."""
    ahead: int = 0
    """Levels of candidates wanted below those of the rows asked about."""

    def __len__(self) -> int:
        return len(self.nodes)

    def path(self, row: int) -> np.ndarray:
        """Token ids from the request's first to this row's own, taken from the slots that the row sees."""
        assert self.slot_tokens is not None, "only a stage's own view knows what its slots hold"
        seen = next(view for view in self.views if view.request == self.requests[row])
        # ``rows`` ascends, since a request's rows are gathered in the batch's order.
        sees = seen.mask[np.searchsorted(seen.rows, row)]
        tokens = np.empty(int(self.positions[row]) + 1, dtype=np.int64)
        # A row sees exactly one slot for each position up to its own, so that every entry is filled, whatever the order
        # of the slots.
        tokens[seen.positions[sees]] = self.slot_tokens[seen.slots[sees]]
        return tokens


def view_of(tokens: Sequence[int], rows: range) -> BatchView:
    """The view of a text in which the token at position i is in slot i and sees those before it."""
    positions, seen = np.asarray(rows), np.arange(rows.stop)
    request = RequestView(0, positions - rows.start, seen, seen, seen[None] <= positions[:, None])
    read = np.asarray(tokens[rows.start : rows.stop])
    return BatchView(np.zeros_like(positions), positions, positions, positions, read, [request], positions - 1)


def part_of(view: BatchView, rows: slice) -> BatchView:
    """The view of some of a batch's rows, whose parents come before them or are among them.

    The parts of a batch are computed in order, so that each one finds the keys and values of all that its rows see.
    """
    first, stop, _ = rows.indices(len(view))
    within = [(one, (first <= one.rows) & (one.rows < stop)) for one in view.views]
    columns = (view.requests, view.nodes, view.slots, view.positions, view.tokens, view.parents)
    requests, nodes, slots, positions, tokens, parents = (column[rows] for column in columns)
    views = [_seen_by(one, own, first) for one, own in within if own.any()]
    levels = None if view.levels is None else view.levels[rows]
    return BatchView(requests, nodes, slots, positions, tokens, views, parents, levels, view.slot_tokens, view.closed)


def _seen_by(view: RequestView, own: np.ndarray, first: int) -> RequestView:
    """A request's rows that are among its ``own``, counted from the batch's row ``first`` on, and what they see."""
    mask = view.mask[own]
    kept = mask.any(axis=0)
    kept[: view.committed] = True  # a layer that carries a state goes by the position of these
    return RequestView(
        view.request, view.rows[own] - first, view.slots[kept], view.positions[kept], mask[:, kept], view.committed
    )


class _RequestSlots:
    """One request on one stage: its committed slots in position order, and the path of every other slot.

    ``positions`` [capacity] holds the position of every slot of the stage.

    A path is the set of the slots that hold a row's ancestors and the row itself, as bits: bit s is slot s. It may hold
    slots that have been committed since, which ``committed_bits`` takes out again. It never holds a slot that has been
    reused, because a row dies with its ancestors.
    """

    def __init__(self, positions: np.ndarray) -> None:
        self.positions = positions
        self.committed = array("q")
        self.is_committed: set[int] = set()
        self.committed_bits = 0
        self.paths: dict[int, int] = {}

    def commit(self, slots: Sequence[int]) -> None:
        """Append slots, in position order, to the committed ones."""
        for slot in slots:
            # Rows below keep the slot's bit in their paths: ``seen_by`` takes it out by ``committed_bits``, since from
            # now on they see the slot as a part of the committed prefix. No other path is touched.
            self.paths.pop(slot, None)
            self.committed.append(slot)
            self.is_committed.add(slot)
            self.committed_bits |= 1 << slot

    def register(self, slot: int, parent: int, position: int) -> None:
        """Enter a row into its slot. Nothing changes for a committed slot, whose row may be computed again."""
        if slot in self.is_committed:
            return
        above = self.paths.get(parent, 0)
        if not above and parent != NO_SLOT and parent not in self.is_committed:
            raise ProtocolError(f"slot {parent} is named as a parent but holds no row")
        if not self._holds(parent, position - 1):
            raise ProtocolError(f"slot {parent} is named as a parent at position {position - 1}, its row has another")
        # A slot is reused only after its row has died with its descendants, so it cannot lie on its own path.
        if above >> slot & 1:
            raise ProtocolError(f"slot {slot} is named for position {position} below the row that it holds")
        self.paths[slot] = above | 1 << slot
        self.positions[slot] = position

    def _holds(self, slot: int, position: int) -> bool:
        """Whether a slot holds a position; NO_SLOT holds -1.

        For committed slots their order says it, computed here or not.
        """
        if slot in self.paths:
            return bool(self.positions[slot] == position)
        if slot == NO_SLOT:
            return position < 0
        return position < len(self.committed) and self.committed[position] == slot

    def seen_by(self, slots: Sequence[int]) -> list[int]:
        """The uncommitted part of each slot's path, as bits; 0 for a slot that is committed itself."""
        uncommitted = ~self.committed_bits
        return [self.paths.get(slot, 0) & uncommitted for slot in slots]


class Visibility:
    """Follows the stream of batches on one stage. ``capacity`` is the number of slots of the stage's arenas.

    ``vocab_size`` is the number of the model's tokens.

    A row sees a slot if and only if that slot holds one of its ancestors or itself. Committed slots are kept in
    position order, so the committed prefix of a row at position p is the first p of them; above it a row sees what its
    parent saw, and itself. Commit and prune therefore move no data. PipeDec (section 3.4.2, algorithm 1) has a cache
    for the prefix and one for the tree in place of this mask.
    """

    def __init__(self, capacity: int, vocab_size: int = MOST) -> None:
        self.capacity = capacity
        self.vocab_size = vocab_size
        self._positions = np.zeros(capacity, dtype=np.int64)
        self._tokens = np.zeros(capacity, dtype=np.int64)
        self._requests: dict[int, _RequestSlots] = {}
        self._closed: list[int] = []

    def apply_header(self, batch: Batch) -> None:
        """Take in the requests that were closed and opened, and the slots that were committed. Every header counts."""
        # In this order: one header may close a preempted request and open it again, with slots that are committed anew.
        for request in batch.closed:
            self._requests.pop(request, None)
            self._closed.append(request)
        for opened in batch.opened:
            if opened.request in self._requests:
                raise ProtocolError(f"stream {batch.stream}: request {opened.request} is opened twice")
            self._requests[opened.request] = _RequestSlots(self._positions)
        for committed in batch.committed:
            check_below(self.capacity, "slot", committed.slots, batch.stream)
            self._of(committed.request, batch.stream).commit(committed.slots)

    def view(self, batch: Batch, surviving: Sequence[int]) -> BatchView:
        """Register the surviving rows of ``batch`` (indices into its rows) and say what each of them sees."""
        rows = batch.rows

        def column(values: Sequence[int]) -> list[int]:
            return [values[row] for row in surviving]

        requests, slots_listed, parents, positions_listed, tokens_listed = map(
            column, (rows.requests, rows.slots, rows.parents, rows.positions, rows.tokens)
        )
        check_below(self.capacity, "slot", slots_listed, batch.stream)
        check_below(self.capacity, "position", positions_listed, batch.stream)  # each position takes a slot
        check_below(self.vocab_size, "token", tokens_listed, batch.stream)
        by_request: dict[int, list[int]] = {}
        for i, request in enumerate(requests):
            by_request.setdefault(request, []).append(i)
        # All rows are registered before any is viewed: a row's parent may be in the same batch.
        for request, indices in by_request.items():
            table = self._of(request, batch.stream)
            for i in indices:
                table.register(slots_listed[i], parents[i], positions_listed[i])
        slots, positions, tokens = map(array_of, (slots_listed, positions_listed, tokens_listed))
        # In stream order: a reused slot has its new token before any row that sees it asks for its path.
        self._tokens[slots] = tokens
        closed, self._closed = self._closed, []
        return BatchView(
            requests=array_of(requests),
            nodes=array_of(column(rows.nodes)),
            slots=slots,
            parents=array_of(parents),
            positions=positions,
            tokens=tokens,
            levels=array_of(column(batch.feature_levels)) if batch.feature_levels else None,
            slot_tokens=self._tokens,
            closed=closed,
            ahead=batch.ahead,
            views=[self._view_request(request, indices, slots, positions) for request, indices in by_request.items()],
        )

    def _of(self, request: int, stream: int) -> _RequestSlots:
        try:
            return self._requests[request]
        except KeyError:
            raise ProtocolError(f"stream {stream}: request {request} is not open") from None

    def _view_request(self, request: int, indices: list[int], slots: np.ndarray, positions: np.ndarray) -> RequestView:
        table = self._requests[request]
        rows = np.asarray(indices, dtype=np.int64)
        # A row at position p sees at most the first p + 1 committed slots.
        seen_committed = min(len(table.committed), int(positions[rows].max()) + 1)
        seen, sees = unpack(table.seen_by(slots[rows].tolist()))
        all_slots = np.concatenate([np.asarray(table.committed[:seen_committed], dtype=np.int64), seen])
        slot_positions = np.concatenate([np.arange(seen_committed, dtype=np.int64), self._positions[seen]])
        mask = np.empty((len(rows), len(all_slots)), dtype=bool)
        # <=, not <: a row whose own slot is committed already, such as a new root after a miss or a token of a prompt,
        # finds itself among the committed slots.
        mask[:, :seen_committed] = slot_positions[None, :seen_committed] <= positions[rows, None]
        mask[:, seen_committed:] = sees
        return RequestView(request, rows, all_slots, slot_positions, mask, seen_committed)


def check_below(limit: int, what: str, numbers: Sequence[int], stream: int) -> None:
    """Raise ProtocolError, naming the first wrong number, unless all are from 0 to ``limit`` - 1."""
    if numbers and not (min(numbers) >= 0 and max(numbers) < limit):
        wrong = next(number for number in numbers if not 0 <= number < limit)
        raise ProtocolError(f"stream {stream}: {what} {wrong} is outside the {limit} of this stage")


def array_of(values: Sequence[int]) -> np.ndarray:
    """The values as int64 [n]."""
    return np.asarray(values, dtype=np.int64)


def unpack(sets: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """The union of sets of bits in ascending order [S], and which of it each set holds, bool [len(sets), S]."""
    union = reduce(or_, sets, 0)
    first = max(0, (union & -union).bit_length() - 1)  # a request's bits lie close together, if far from 0
    octets = (union.bit_length() - first) // 8 + 1
    packed = np.frombuffer(b"".join((bits >> first).to_bytes(octets, "little") for bits in (union, *sets)), np.uint8)
    unpacked = np.unpackbits(packed.reshape(-1, octets), axis=1, bitorder="little")
    held = unpacked[0].nonzero()[0]
    return held + first, unpacked[1:, held]


# ----------------------------------------------------------------------------------------------------------------- near
# Slots of layers that reach back only so far (windows, chunks): slots out of reach give back their places. No torch.
#
#   slots of a request    0 1 2 3 4 5 6 7 8 9        all of them, as the engine names them
#   places, reach 4       . . . . 1 2 0 3 4 5        0 to 3 are out of reach: their places are free again
#
# A row at position p reaches the positions from p - ``reach`` + 1 on. Rows enter once and after their ancestors, so no
# later row stands before the first one of a batch, or before the last committed position. No messages are needed: all
# this follows from the stream of batches. It holds where no two requests share slots, that is without prefix caching.

NO_PLACE: Final = -1
"""The value that stands for a place where a slot has none."""
FIRST: Final = 256
"""Number of places at the start. It is doubled whenever they do not suffice."""


@dataclass
class _Held:
    """The slots of a request that have places: committed ones from position ``until`` on, drafted ones by position."""

    low: int = 0
    """No later row stands before this position."""
    until: int = 0
    """Committed slots before this position have given their places back."""
    committed: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    drafted: dict[int, int] = field(default_factory=dict)


class NearSlots:
    """The places of a stage's slots. There are ``size`` of them; index ``size`` stands for a slot that has none."""

    def __init__(self, capacity: int, reach: int) -> None:
        self.reach = reach
        self.size = min(FIRST, capacity)
        self._capacity = capacity
        self.forget()

    def forget(self) -> None:
        """Forget all rows and requests. The number of places stays."""
        self._place = np.full(self._capacity, NO_PLACE, dtype=np.int64)
        self._free = list(range(self.size))
        self._requests: dict[int, _Held] = {}
        self._holder: dict[int, int] = {}
        """Slot that has a place -> its request."""

    @property
    def held(self) -> int:
        """Number of places that are taken."""
        return self.size - len(self._free)

    def enter(self, view: BatchView) -> BatchView:
        """The same batch with places instead of slots. Call it once for each batch, before its rows are computed."""
        for request in view.closed:
            self._close(request)
        # All releases come first: a place that one request gives back may serve another in the same batch.
        for seen in view.views:
            self._release(seen, self._requests.setdefault(seen.request, _Held()))
        for seen in view.views:
            self._take(seen, view.slots[seen.rows].tolist(), view.positions[seen.rows].tolist())
        views = [replace(seen, slots=self._placed(seen.slots)) for seen in view.views]
        return replace(view, slots=self._placed(view.slots), views=views)

    def _placed(self, slots: np.ndarray) -> np.ndarray:
        places: np.ndarray = self._place[slots]
        # NO_PLACE is -1, which as an index would stand for the last place. Index ``size`` is nobody's place.
        places[places == NO_PLACE] = self.size
        return places

    def _release(self, seen: RequestView, held: _Held) -> None:
        """Free the places of committed slots that are out of reach by now, and of drafts that were rejected."""
        held.committed = seen.slots[: seen.committed]
        # ``low`` is the first position of the batches before: this batch's own rows have not been entered yet.
        limit = min(held.low - self.reach, seen.committed)
        if limit > held.until:
            self._give_back(held.committed[held.until : limit].tolist())
            held.until = limit
        settled = [(slot, at) for slot, at in held.drafted.items() if at < seen.committed]
        for slot, at in settled:
            del held.drafted[slot]
            # The position has been committed in another slot, so this draft was rejected.
            if held.committed[at] != slot:
                self._give_back([slot])

    def _take(self, seen: RequestView, slots: list[int], positions: list[int]) -> None:
        held = self._requests[seen.request]
        low = min(seen.committed, *positions)
        if low < held.low:
            raise ProtocolError(f"request {seen.request}: a row at position {low} comes after what reached {held.low}")
        held.low = low
        for slot, position in zip(slots, positions, strict=True):
            # A dead draft's slot can be used again before its position is committed. It keeps its place.
            if slot in self._holder:
                self._requests[self._holder[slot]].drafted.pop(slot, None)
            else:
                self._place[slot] = self._free_place()
            self._holder[slot] = seen.request
            if position >= seen.committed:
                held.drafted[slot] = position

    def _free_place(self) -> int:
        if not self._free:
            more = min(2 * self.size, self._capacity)
            self._free, self.size = list(range(self.size, more)), more
        return heapq.heappop(self._free)

    def _close(self, request: int) -> None:
        held = self._requests.pop(request, None)
        if held is not None:
            self._give_back([*held.committed[held.until :].tolist(), *held.drafted])

    def _give_back(self, slots: list[int]) -> None:
        """Free the places of these slots.

        Some may have none: a token can be committed before its row comes, or without one.
        """
        for slot in slots:
            if self._holder.pop(slot, None) is not None:
                heapq.heappush(self._free, int(self._place[slot]))
                self._place[slot] = NO_PLACE
