"""A row sees its ancestors and itself: checked by the plain definition, on random trees with reused slots."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.messages import NO_SLOT, Batch, CommittedSlots, Opened, Rows, Sampling
from penstock.stage.visibility import ProtocolError, Visibility
from tests.hash_model import committed_slots


@dataclass(eq=False)
class Row:
    slot: int
    position: int
    token: int
    parent: Row | None
    fed: bool = False
    children: list[Row] = field(default_factory=list)

    def ancestors(self) -> dict[int, int]:
        """Slot to position, the row itself included."""
        own = {self.slot: self.position}
        return own if self.parent is None else {**self.parent.ancestors(), **own}

    def path(self) -> list[int]:
        """Token ids from the request's first to the row's own."""
        return [*(self.parent.path() if self.parent else []), self.token]


class Forest:
    """Requests that grow, commit, prune and end at random over few slots; knows nothing of how a stage sees them."""

    def __init__(self, rng: random.Random, capacity: int) -> None:
        self.rng = rng
        self.free = list(range(capacity))
        self.roots: dict[int, list[Row]] = {}
        self.told: dict[int, int] = {}
        self.closed: list[int] = []
        self.next_request = 0

    def take(self, parent: Row | None) -> Row:
        slot = self.free.pop(self.rng.randrange(len(self.free)))
        row = Row(slot, 0 if parent is None else parent.position + 1, self.rng.randrange(9), parent)
        if parent is not None:
            parent.children.append(row)
        return row

    def below(self, row: Row) -> list[Row]:
        return [row, *(deeper for child in row.children for deeper in self.below(child))]

    def grow(self, request: int) -> list[Row]:
        """New rows below random live ones, parents first."""
        fresh = []
        for _ in range(min(self.rng.randint(0, 5), len(self.free))):
            fresh.append(self.take(self.rng.choice(self.below(self.roots[request][-1]))))
        return fresh

    def commit(self, request: int) -> None:
        """The root's successor is one of its children that have entered; the other branches' slots are free at once."""
        root = self.roots[request][-1]
        fed = [child for child in root.children if child.fed]
        if not fed or self.rng.random() < 0.3:
            return
        hit = self.rng.choice(fed)
        for child in root.children:
            if child is not hit:
                self.free += [row.slot for row in self.below(child)]
        root.children = [hit]
        self.roots[request].append(hit)

    def end(self, request: int) -> None:
        committed = self.roots.pop(request)
        self.free += [row.slot for row in [*committed[:-1], *self.below(committed[-1])]]
        self.closed.append(request)
        del self.told[request]

    def batch(self, stream: int) -> tuple[Batch, list[Row]]:
        batch = Batch(stream=stream, rows=Rows(), closed=self.closed)
        self.closed = []
        if len(self.free) > 2 and self.rng.random() < 0.5:
            self.roots[self.next_request] = [self.take(None)]
            self.next_request += 1
        rows: list[Row] = []
        for request, committed in self.roots.items():
            entering = self.grow(request)
            if request not in self.told:
                batch.opened.append(Opened(request, Sampling()))
                self.told[request] = 0
                entering = [committed[0], *entering]
            for row in entering:
                row.fed = True
                parent = NO_SLOT if row.parent is None else row.parent.slot
                batch.rows.append(request, len(rows), row.slot, parent, row.position, row.token)
                rows.append(row)
            slots = [row.slot for row in committed[self.told[request] :]]
            if slots and self.rng.random() < 0.7:
                batch.committed.append(CommittedSlots(request, slots))
                self.told[request] = len(committed)
        batch.alive = list(range(len(rows)))
        return batch, rows


@settings(max_examples=150)
@given(st.randoms(use_true_random=False), st.integers(4, 30))
def test_a_row_sees_its_ancestors_and_itself(rng: random.Random, capacity: int) -> None:
    forest, visibility = Forest(rng, capacity), Visibility(capacity)
    for stream in range(25):
        batch, rows = forest.batch(stream)
        visibility.apply_header(batch)
        view = visibility.view(batch, batch.alive)
        assert len(view) == len(rows)
        assert [view.path(i).tolist() for i in range(len(rows))] == [row.path() for row in rows]
        seen_rows = []
        for part in view.views:
            for line, index in enumerate(part.rows.tolist()):
                seen_rows.append(index)
                assert batch.rows.requests[index] == part.request
                columns = part.mask[line].nonzero()[0]
                seen = {int(part.slots[c]): int(part.positions[c]) for c in columns}
                assert len(seen) == len(columns), "a slot is seen once"
                assert seen == rows[index].ancestors()
            assert part.mask.any(axis=0).all(), "no slot is gathered that nobody sees"
        assert sorted(seen_rows) == batch.alive
        assert committed_slots(visibility) == {
            number: [row.slot for row in forest.roots[number][:told]] for number, told in forest.told.items()
        }
        for request in list(forest.roots):
            forest.commit(request)
            if rng.random() < 0.08:
                forest.end(request)


def chain(*slots: int, request: int = 0, **header: object) -> Batch:
    """Rows at positions 0, 1, .. in these slots."""
    rows = Rows()
    for position, slot in enumerate(slots):
        rows.append(request, position, slot, slots[position - 1] if position else NO_SLOT, position, 0)
    return Batch(stream=0, rows=rows, alive=list(range(len(rows))), opened=[Opened(request, Sampling())], **header)


def feed(visibility: Visibility, batch: Batch) -> None:
    visibility.apply_header(batch)
    visibility.view(batch, batch.alive)


def test_a_dropped_row_is_not_registered() -> None:
    visibility = Visibility(8)
    batch = chain(3, 4)
    visibility.apply_header(batch)
    visibility.view(batch, [0])
    late = Batch(stream=1, rows=Rows([0], [9], [5], [4], [2], [0]), alive=[0])
    with pytest.raises(ProtocolError, match="slot 4 is named as a parent but holds no row"):
        feed(visibility, late)


@pytest.mark.parametrize(
    ("rows", "header", "complaint"),
    [
        (Rows([0], [5], [8], [0], [1], [0]), {}, "slot 8 is outside the 8"),
        (Rows([0], [5], [-2], [0], [1], [0]), {}, "slot -2 is outside"),
        (Rows([7], [5], [2], [0], [1], [0]), {}, "request 7 is not open"),
        (Rows([0], [5], [2], [6], [1], [0]), {}, "slot 6 is named as a parent but holds no row"),
        (Rows([0], [5], [2], [2], [2], [0]), {}, "slot 2 is named as a parent but holds no row"),
        (Rows([0], [5], [0], [1], [2], [0]), {}, "slot 0 is named for position 2 below the row that it holds"),
        (Rows([0], [5], [2], [1], [4], [0]), {}, "slot 1 is named as a parent at position 3"),
        (Rows([0], [5], [2], [1], [8], [0]), {}, "position 8 is outside the 8"),
        (Rows([0], [5], [2], [1], [2], [50]), {}, "token 50 is outside the 50"),
        (Rows([0], [5], [2], [NO_SLOT], [3], [0]), {}, "slot -1 is named as a parent at position 2"),
        (Rows([0], [5], [2], [0], [2], [0]), {"committed": [CommittedSlots(0, [0])]}, "slot 0 .* at position 1"),
        (Rows([0], [5], [2], [1], [1], [0]), {"committed": [CommittedSlots(0, [0, 1])]}, "slot 1 .* at position 0"),
        (Rows(), {"committed": [CommittedSlots(0, [8])]}, "slot 8 is outside"),
        (Rows(), {"committed": [CommittedSlots(9, [1])]}, "request 9 is not open"),
        (Rows(), {"opened": [Opened(0, Sampling())]}, "request 0 is opened twice"),
        (Rows(), {"opened": [Opened(1, Sampling())] * 2}, "request 1 is opened twice"),
    ],
)
def test_contradictions_are_refused(rows: Rows, header: dict, complaint: str) -> None:
    visibility = Visibility(8, 50)
    feed(visibility, chain(0, 1))
    with pytest.raises(ProtocolError, match=complaint):
        feed(visibility, Batch(stream=1, rows=rows, alive=list(range(len(rows))), **header))


def test_parents_in_a_circle_are_refused() -> None:
    """Slots 1 and 2, each the other's parent: only somebody who lies can write that, and nobody may hang on it."""
    visibility = Visibility(8)
    feed(visibility, chain(0, 1, 2))
    with pytest.raises(ProtocolError, match="position"):
        feed(visibility, Batch(stream=1, rows=Rows([0], [9], [1], [2], [3], [0]), alive=[0]))


def test_closing_forgets_and_a_number_may_then_be_opened_anew() -> None:
    visibility = Visibility(4)
    feed(visibility, chain(0, 1, committed=[CommittedSlots(0, [0, 1])]))
    assert committed_slots(visibility) == {0: [0, 1]}
    visibility.apply_header(Batch(stream=1, rows=Rows(), closed=[0, 5]))
    assert committed_slots(visibility) == {}
    feed(visibility, chain(1, 0))
    assert committed_slots(visibility) == {0: []}
