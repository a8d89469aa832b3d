"""Which slots each row of a batch may see: the part of a stage that every replica must agree on. No torch here."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.core import PenstockError
from penstock.messages import NO_SLOT, Batch


class ProtocolError(PenstockError):
    """A batch inside the stream that contradicts what came before it. Ends the session's pipeline."""


@dataclass(frozen=True)
class RequestView:
    """What the rows of one request see in one batch.

    ``rows``      [n]     indices into the surviving rows of the batch
    ``slots``     [S]     the slots that at least one of them sees, certain ones first, in position order
    ``positions`` [S]     the position that each of these slots holds
    ``mask``      [n, S]  True where the row sees the slot (its ancestors, its certain prefix, itself)
    """

    request: int
    rows: np.ndarray
    slots: np.ndarray
    positions: np.ndarray
    mask: np.ndarray


@dataclass(frozen=True)
class BatchView:
    """The surviving rows of a batch as arrays of one entry per row, and what each request among them sees."""

    requests: np.ndarray
    nodes: np.ndarray
    slots: np.ndarray
    positions: np.ndarray
    tokens: np.ndarray
    views: Sequence[RequestView]

    def __len__(self) -> int:
        return len(self.nodes)


class _RequestSlots:
    """One request on one stage: its certain slots in position order, and parent and position of every other slot."""

    def __init__(self) -> None:
        self.certain = array("q")
        self.is_certain: set[int] = set()
        self.rows: dict[int, tuple[int, int]] = {}

    def certify(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self.rows.pop(slot, None)
            self.certain.append(slot)
            self.is_certain.add(slot)

    def ancestors(self, slot: int, seen: dict[int, int]) -> int:
        """What ``slot`` sees above the certain prefix, itself included, as a set of bits.

        ``seen`` holds, slot by slot, what is known of this batch already; a slot's bit is its place in it. Only the
        part of the path that is not in it yet is walked, each parent one position higher, and put there.
        """
        path: list[int] = []
        position = self.rows[slot][1] if slot in self.rows else 0
        while (row := self.rows.get(slot)) is not None:
            if row[1] != position:
                raise ProtocolError(f"slot {slot} is named as a parent at position {position}, its row has another")
            if slot in seen:
                break
            path.append(slot)
            slot, position = row[0], position - 1
        else:
            if slot != NO_SLOT and slot not in self.is_certain:
                raise ProtocolError(f"slot {slot} is named as a parent but holds no row")
        bits = seen.get(slot, 0)
        for below in reversed(path):
            bits |= 1 << len(seen)
            seen[below] = bits
        return bits


class Visibility:
    """Follows the stream of batches on one stage. ``capacity`` is the number of slots of the stage's arenas.

    A row sees a slot if and only if that slot holds one of its ancestors or itself. Certain slots are kept in
    position order, so the certain prefix of a row at position p is the first p of them; above it the row's parents
    are followed through slots that are not certain yet. Commit and prune therefore move no data.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._requests: dict[int, _RequestSlots] = {}

    @property
    def open_requests(self) -> set[int]:
        return set(self._requests)

    def certain_slots(self, request: int) -> list[int]:
        return list(self._requests[request].certain)

    def apply_header(self, batch: Batch) -> None:
        """Take in what has been closed, opened and become certain. Every batch's header, also one without rows."""
        for request in batch.closed:
            self._requests.pop(request, None)
        for opened in batch.opened:
            if opened.request in self._requests:
                raise ProtocolError(f"stream {batch.stream}: request {opened.request} is opened twice")
            self._requests[opened.request] = _RequestSlots()
        for certain in batch.certain:
            for slot in certain.slots:
                self._check_slot(slot, batch.stream)
            self._of(certain.request, batch.stream).certify(certain.slots)

    def view(self, batch: Batch, surviving: Sequence[int]) -> BatchView:
        """Register the surviving rows of ``batch`` (indices into its rows) and say what each of them sees."""
        rows = batch.rows
        by_request: dict[int, list[int]] = {}
        for i, row in enumerate(surviving):
            slot, request = rows.slots[row], rows.requests[row]
            self._check_slot(slot, batch.stream)
            table = self._of(request, batch.stream)
            if slot not in table.is_certain:
                table.rows[slot] = rows.parents[row], rows.positions[row]
            by_request.setdefault(request, []).append(i)

        def column(values: Sequence[int]) -> np.ndarray:
            return np.asarray([values[row] for row in surviving], dtype=np.int64)

        slots, positions = column(rows.slots), column(rows.positions)
        return BatchView(
            requests=column(rows.requests),
            nodes=column(rows.nodes),
            slots=slots,
            positions=positions,
            tokens=column(rows.tokens),
            views=[self._view_request(request, indices, slots, positions) for request, indices in by_request.items()],
        )

    def _check_slot(self, slot: int, stream: int) -> None:
        if not 0 <= slot < self.capacity:
            raise ProtocolError(f"stream {stream}: slot {slot} is outside the {self.capacity} of this stage")

    def _of(self, request: int, stream: int) -> _RequestSlots:
        try:
            return self._requests[request]
        except KeyError:
            raise ProtocolError(f"stream {stream}: request {request} is not open") from None

    def _view_request(self, request: int, indices: list[int], slots: np.ndarray, positions: np.ndarray) -> RequestView:
        table = self._requests[request]
        rows = np.asarray(indices, dtype=np.int64)
        seen_certain = min(len(table.certain), int(positions[rows].max()) + 1)
        seen: dict[int, int] = {}
        sets = [table.ancestors(int(slots[i]), seen) for i in indices]
        all_slots = np.asarray(table.certain[:seen_certain] + array("q", seen), dtype=np.int64)
        slot_positions = np.arange(len(all_slots), dtype=np.int64)
        slot_positions[seen_certain:] = [table.rows[slot][1] for slot in seen]
        mask = np.zeros((len(rows), len(all_slots)), dtype=bool)
        mask[:, :seen_certain] = slot_positions[None, :seen_certain] <= positions[rows, None]
        mask[:, seen_certain:] = unpack(sets, len(seen))
        return RequestView(request, rows, all_slots, slot_positions, mask)


def unpack(sets: Sequence[int], size: int) -> np.ndarray:
    """Sets of bits below ``size`` as rows of zeros and ones, [len(sets), size]."""
    octets = size // 8 + 1
    packed = np.frombuffer(b"".join(bits.to_bytes(octets, "little") for bits in sets), dtype=np.uint8)
    return np.unpackbits(packed.reshape(len(sets), octets), axis=1, count=size, bitorder="little")
