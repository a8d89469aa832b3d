"""Dependencies between the rows of a batch, worked out from what each row sees."""

from __future__ import annotations

import numpy as np
import torch

from penstock.models.recurrent import FOLD, TreePlan
from penstock.stage.visibility import BatchView, RequestView
from tests.unit.models.recurrent.trees import CAPACITY, histories

CPU = torch.device("cpu")


def chain(first: int, last: int) -> BatchView:
    """Rows first .. last of one text, all certain, in slots 0, 1, 2.."""
    rows, seen = np.arange(first, last), np.arange(last)
    request = RequestView(0, rows - first, seen, seen, seen[None] <= rows[:, None], last)
    return BatchView(rows * 0, rows, rows, rows, rows * 0, [request], rows - 1)


def test_ancestors_are_those_of_the_path() -> None:
    parent_of: dict[int, int] = {}
    for view in histories(seed=3, steps=60):
        parent_of.update(zip(view.slots.tolist(), view.parents.tolist(), strict=True))
        found = TreePlan(view, CAPACITY, CPU).ancestors(3).tolist()
        for slot, ancestors in zip(view.slots.tolist(), found, strict=True):
            for ancestor in ancestors:
                slot = parent_of[slot] if slot >= 0 else slot
                assert ancestor == (slot if slot >= 0 else CAPACITY)


def test_parts_end_where_a_fold_may() -> None:
    plan = TreePlan(chain(50, 200), CAPACITY, CPU)
    assert [(part.base, part.own.tolist()) for part in plan.parts] == [
        (0, list(range(50, 64))),
        (64, list(range(64, 128))),
        (128, list(range(128, 192))),
        (192, list(range(192, 200))),
    ]
    assert [part.above.tolist() for part in plan.parts] == [list(range(50)), [], [], []]
    assert [part.top.tolist()[0] for part in plan.parts] == [49, 63, 127, 191]


def test_drafted_rows_are_together_across_a_fold() -> None:
    """Rows 60 to 69 of which 60 are committed: what is not committed folds nothing."""
    rows, seen = np.arange(60, 70), np.arange(70)
    request = RequestView(0, rows - 60, seen, seen, seen[None] <= rows[:, None], 60)
    view = BatchView(rows * 0, rows, rows, rows, rows * 0, [request], rows - 1)
    (part,) = TreePlan(view, CAPACITY, CPU).parts
    assert (part.base, len(part.above), len(part.own)) == (0, 60, 10)


def test_no_part_is_longer_than_a_fold() -> None:
    rows = np.arange(150)
    request = RequestView(0, rows, rows, rows, np.tri(150, dtype=bool))
    view = BatchView(rows * 0, rows, rows, rows, rows * 0, [request], rows - 1)
    parts = TreePlan(view, CAPACITY, CPU).parts
    assert [len(part.own) for part in parts] == [FOLD, FOLD, 150 - 2 * FOLD]
    assert {part.base for part in parts} == {0}


def test_a_path_with_a_gap_ends_at_the_gap() -> None:
    """Rows 0 and 2 of a text, row 1 of which is there already: row 2 adds to what row 1 came to."""
    order = np.arange(3)
    mask = np.tri(3, dtype=bool)[[0, 2]]
    request = RequestView(0, np.arange(2), order, order, mask, 3)
    at = np.array([0, 2])
    view = BatchView(at * 0, at, at, at, at * 0, [request], at - 1)
    (part,) = TreePlan(view, CAPACITY, CPU).parts
    assert part.top.tolist() == [CAPACITY, 1]
    assert part.run_nn.tolist() == [[True, False], [False, True]]
    assert part.sees_nn.tolist() == [[True, False], [True, True]]
