"""The folded state against its definition, one row after another along its path."""

from __future__ import annotations

import pytest
import torch

from penstock.models.recurrent import FOLD, FoldedState, Rows, SteppedState, TreePlan
from penstock.stage.visibility import BatchView
from tests.unit.models.recurrent.test_plan import chain
from tests.unit.models.recurrent.trees import CAPACITY, histories

CPU = torch.device("cpu")
KINDS = ["delta", "channels", "mamba2"]


def rows_of(count: int, kind: str, generator: torch.Generator) -> Rows:
    """Random rows: 4 heads of the state and 2 of keys, widths 5 and 3; decays from nearly all to nearly nothing."""

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    key = torch.nn.functional.normalize(normal(count, 2, 5), dim=-1)
    decay = -torch.exp(3 * normal(count, 4, 5 if kind == "channels" else 1))
    beta = None if kind == "mamba2" else 2 * torch.rand(count, 4, generator=generator, dtype=torch.float64)
    return Rows(normal(count, 2, 5), key, normal(count, 4, 3), decay, beta)


def check(views: list[BatchView], kind: str, folded: FoldedState, generator: torch.Generator) -> None:
    stepped = SteppedState(CAPACITY)
    for view in views:
        rows = rows_of(len(view), kind, generator)
        plan = TreePlan(view, CAPACITY, CPU)
        torch.testing.assert_close(folded.read(rows, plan), stepped.read(rows, plan), atol=1e-10, rtol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(4))
def test_trees_that_grow_shrink_and_share_a_prefix(kind: str, seed: int) -> None:
    views = list(histories(seed, steps=80))
    texts = [view for batch in views for view in batch.views]
    assert {view.request for view in texts} == {0, 1, 2}
    assert max(len(view.slots) for view in texts) > FOLD, "nothing was folded"
    assert max(len(view.rows) for view in texts) > 1
    check(views, kind, FoldedState(CAPACITY, torch.float64), torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk", [1, 7, 64, 100, 200])
def test_where_a_text_is_cut_makes_no_difference(kind: str, chunk: int) -> None:
    """Up to a rounding or two: a product of one row may add in another order than one of many."""
    whole, cut = FoldedState(CAPACITY), FoldedState(CAPACITY)
    rows = rows_of(200, kind, torch.Generator().manual_seed(1)).to(torch.float32)
    expected = whole.read(rows, TreePlan(chain(0, 200), CAPACITY, CPU))
    for first in range(0, 200, chunk):
        at = torch.arange(first, min(first + chunk, 200))
        found = cut.read(rows.at(at), TreePlan(chain(first, int(at[-1]) + 1), CAPACITY, CPU))
        torch.testing.assert_close(found, expected[at], atol=2e-5, rtol=1e-5)


def test_rows_that_are_computed_anew_find_the_state_before_them() -> None:
    state = FoldedState(CAPACITY, torch.float64)
    rows = rows_of(200, "delta", torch.Generator().manual_seed(1))
    first = state.read(rows, TreePlan(chain(0, 200), CAPACITY, CPU))
    at = torch.arange(70, 90)
    again = state.read(rows.at(at), TreePlan(chain(70, 90), CAPACITY, CPU))
    torch.testing.assert_close(again, first[at])


def test_a_request_that_has_ended_leaves_no_state() -> None:
    state = FoldedState(CAPACITY)
    rows = rows_of(100, "delta", torch.Generator().manual_seed(1)).to(torch.float32)
    state.read(rows, TreePlan(chain(0, 100), CAPACITY, CPU))
    assert list(state._folded) == [0]
    state.forget([0, 5])
    assert not state._folded


def test_what_is_kept_of_a_row() -> None:
    """Keys and values in float32, and the sum of log decays in float64; one slot stands for none."""
    state = FoldedState(CAPACITY)
    rows = rows_of(1, "delta", torch.Generator().manual_seed(1)).to(torch.float32)
    state.read(rows, TreePlan(chain(0, 1), CAPACITY, CPU))
    assert state.bytes == (CAPACITY + 1) * (4 * (2 * 5 + 4 * 3) + 8 * 4)
