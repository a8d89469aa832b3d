"""Attention over slots against a softmax over just the slots that each row sees."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.models import attention
from penstock.models.attention import (
    EVERYTHING,
    Arenas,
    Plan,
    Scoring,
    SlotAttention,
    Span,
    fast_attention,
    flash_kernel,
    folded_kernel,
    plain_kernel,
    precise_kernel,
)
from penstock.stage.visibility import BatchView, RequestView

CAPACITY = 64
CPU = torch.device("cpu")


class Layer:
    layer_idx = 3


def make_view(requests: list[tuple[int, list[int]]], seed: int = 0) -> BatchView:
    """Requests of (rows, slots): the rows stand in the last of the slots, each seeing itself and a random half."""
    rng = np.random.default_rng(seed)
    views, slots, positions, row = [], [], [], 0
    for number, (count, own) in enumerate(requests):
        mask = rng.random((count, len(own))) < 0.5
        mask[:, -count:] = np.eye(count, dtype=bool)
        at = np.arange(len(own))
        views.append(RequestView(number, np.arange(row, row + count), np.array(own), at, mask))
        slots += own[-count:]
        positions += list(at[-count:])
        row += count
    zeros = np.zeros(row, dtype=np.int64)
    return BatchView(zeros, zeros, np.array(slots), np.array(positions), zeros, views, zeros - 1)


def expected_NHe(
    view: BatchView, query: Tensor, keys: Tensor, values: Tensor, scoring: Scoring, window: int | None = None
) -> Tensor:
    """Row by row and head by head in float64, over the slots that the row sees and no others."""
    heads, groups = len(query), len(query) // len(keys)
    output = torch.zeros(query.shape[1], heads, values.shape[2], dtype=torch.float64)
    for request in view.views:
        for row, sees in zip(request.rows, request.mask, strict=True):
            near = view.positions[row] - request.positions < (window or 10**9)
            slots = request.slots[sees & near]
            for head in range(heads):
                scores = keys[head // groups, slots].double() @ query[head, row].double() * scoring.scaling
                if scoring.softcap is not None:
                    scores = torch.tanh(scores / scoring.softcap) * scoring.softcap
                sink = [] if scoring.sinks_H is None else [scoring.sinks_H[head].double().reshape(1)]
                chances = torch.cat([scores, *sink]).softmax(0)[: len(slots)]
                output[row, head] = chances @ values[head // groups, slots].double()
    return output


def run(view: BatchView, kernel, in_place: bool, scoring: Scoring, window: int | None = None, width: int = 8):
    """Attention of fresh rows over arenas full of other rows' large numbers; returns (result, expected)."""
    torch.manual_seed(1)
    heads, key_heads, rows = 6, 2, len(view)
    arenas = Arenas(CAPACITY)
    everything = torch.arange(CAPACITY)
    arenas.store(3, everything, torch.randn(key_heads, CAPACITY, 8) * 3, torch.randn(key_heads, CAPACITY, width) * 100)
    query, key, value = (torch.randn(n, rows, w) for n, w in ((heads, 8), (key_heads, 8), (key_heads, width)))
    attend = SlotAttention(arenas, Plan(view, CPU, in_place), kernel)
    options = {"scaling": scoring.scaling, "softcap": scoring.softcap, "s_aux": scoring.sinks_H}
    result = attend(Layer(), query, key, value, None, sliding_window=window, **options)
    keys, values = arenas.store(3, everything[:0], key[:, :0], value[:, :0])
    return result, expected_NHe(view, query, keys, values, scoring, window)


VIEWS = {
    "dense": make_view([(4, [9, 3, 5, 4, 6, 8, 7, 10])]),
    "scattered": make_view([(4, [60, 3, 33, 12, 45, 21, 50, 1])]),
    "lone row among dead slots": make_view([(1, [2, 3, 5, 6, 7])]),
    "three requests": make_view([(3, [0, 2, 4, 6, 8]), (1, [1, 3, 5]), (2, [40, 11, 62, 7])]),
    "first row of all": make_view([(1, [17])]),
}
SCORINGS = {
    "usual": Scoring(0.3),
    "softcap": Scoring(0.3, softcap=2.0),
    "sinks": Scoring(0.3, sinks_H=torch.tensor([0.5, -1.0, 2.0, 0.0, 1.5, -0.5])),
}


@pytest.mark.parametrize("kernel", [folded_kernel, flash_kernel, plain_kernel, precise_kernel])
@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())
@pytest.mark.parametrize("scoring", SCORINGS.values(), ids=SCORINGS.keys())
def test_rows_see_their_slots_and_no_others(view: BatchView, scoring: Scoring, in_place: bool, kernel) -> None:
    result, expected = run(view, kernel, in_place, scoring)
    torch.testing.assert_close(result.double(), expected, atol=1e-3, rtol=1e-5)


@pytest.mark.parametrize("kernel", [folded_kernel, flash_kernel, plain_kernel, precise_kernel])
@pytest.mark.parametrize("window", [1, 3])
def test_window_counts_positions_including_the_own(kernel, window: int) -> None:
    result, expected = run(VIEWS["three requests"], kernel, True, Scoring(0.3), window=window)
    torch.testing.assert_close(result.double(), expected, atol=1e-3, rtol=1e-5)


@pytest.mark.parametrize("kernel", [folded_kernel, flash_kernel, plain_kernel, precise_kernel])
def test_values_may_be_narrower_than_keys(kernel) -> None:
    result, expected = run(VIEWS["dense"], kernel, True, Scoring(0.3), width=5)
    assert result.shape[2] == 5
    torch.testing.assert_close(result.double(), expected, atol=1e-3, rtol=1e-5)


@pytest.mark.parametrize("seed", range(4))
def test_one_product_over_slots_is_pipedecs_over_two_caches(seed: int) -> None:
    """PipeDec's algorithm 1, lines 2 to 8: scores over the text's cache and the tree's apart, under one softmax."""
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    past, nodes, rows, heads, width = 12, 9, 4, 6, 8
    slots = rng.permutation(CAPACITY)[: past + nodes]
    mask_nP = np.tril(rng.random((nodes, nodes)) < 0.4, -1)[-rows:]
    mask_nP[:, -rows:] = np.eye(rows, dtype=bool)  # a layer's nodes: each sees itself, and some of the layers above
    query, key, value = (torch.randn(heads, n, width, generator=generator) for n in (rows, past + nodes, past + nodes))

    scores_past, scores_predict = (query @ part.transpose(1, 2) * 0.3 for part in (key[:, :past], key[:, past:]))
    scores_predict = scores_predict.masked_fill(~torch.from_numpy(mask_nP), -torch.inf)
    chances = torch.cat([scores_past, scores_predict], dim=-1).softmax(-1)
    expected = chances[..., :past] @ value[:, :past] + chances[..., past:] @ value[:, past:]

    arenas, at = Arenas(CAPACITY), np.arange(past + nodes)
    arenas.store(3, torch.arange(CAPACITY), torch.zeros(heads, CAPACITY, width), torch.zeros(heads, CAPACITY, width))
    arenas.store(3, torch.from_numpy(slots[:-rows]), key[:, :-rows], value[:, :-rows])
    sees = np.concatenate([np.ones((rows, past), dtype=bool), mask_nP], axis=1)
    zeros = np.zeros(rows, dtype=np.int64)
    request = RequestView(0, np.arange(rows), slots, at, sees)
    view = BatchView(zeros, zeros, slots[-rows:], at[-rows:], zeros, [request], zeros - 1)
    attend = SlotAttention(arenas, Plan(view, CPU, in_place=True), plain_kernel)
    found = attend(Layer(), query, key[:, -rows:], value[:, -rows:], None, scaling=0.3)
    torch.testing.assert_close(found.transpose(0, 1), expected)


def test_close_slots_are_read_in_place_and_far_ones_gathered() -> None:
    def columns(view: BatchView) -> slice | Tensor:
        return Plan(view, CPU, in_place=True).segments(EVERYTHING)[0].columns

    assert columns(VIEWS["dense"]) == slice(3, 11)
    assert columns(VIEWS["lone row among dead slots"]) == slice(2, 8)
    assert columns(VIEWS["scattered"]).tolist() == [60, 3, 33, 12, 45, 21, 50, 1]


def test_slots_that_no_row_sees_through_its_window_are_not_read() -> None:
    view = make_view([(2, list(range(20)))])
    view.views[0].mask[:, :-2] = True
    assert Plan(view, CPU, in_place=True).segments(Span(window=4))[0].columns == slice(15, 20)


@pytest.mark.parametrize("in_place", [True, False])
def test_long_prompts_are_attended_to_in_parts(monkeypatch: pytest.MonkeyPatch, in_place: bool) -> None:
    monkeypatch.setattr(attention, "MOST_SCORES", 40)
    view = make_view([(7, list(range(20, 0, -1))), (1, [30, 31, 33])])
    assert [len(s.mask_nS) for s in Plan(view, CPU, in_place).segments(EVERYTHING)] == [2, 2, 2, 1, 1]
    result, expected = run(view, folded_kernel, in_place, Scoring(0.3))
    torch.testing.assert_close(result.double(), expected, atol=1e-3, rtol=1e-5)


def test_half_precision_takes_torchs_own_attention() -> None:
    plan = Plan(VIEWS["dense"], CPU, in_place=True)
    kernels = {
        dtype: fast_attention(Arenas(CAPACITY), plan, dtype).kernel
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
    }
    assert list(kernels.values()) == [folded_kernel, flash_kernel, flash_kernel]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scores_in_half_precision_would_cost_twice_the_error_and_more(dtype: torch.dtype) -> None:
    """``folded_kernel`` has a plain product, on every device; torch's attention keeps the scores in float32."""
    torch.manual_seed(2)
    view = make_view([(4, list(range(40)))])
    segment = Plan(view, CPU, in_place=True).segments(EVERYTHING)[0]
    query, keys, values = (torch.randn(n, rows, 64).to(dtype) for n, rows in ((8, 4), (2, 40), (2, 40)))
    exact = precise_kernel(query.double(), keys.double(), values.double(), segment, Scoring(0.5))
    segment._bias.clear()  # each kernel makes it in its own format
    error = {}
    for kernel in (folded_kernel, flash_kernel):
        error[kernel] = (kernel(query, keys, values, segment, Scoring(0.5)).double() - exact).square().mean().sqrt()
    assert error[folded_kernel] > 2 * error[flash_kernel]


def test_overflow_in_float16_stays_with_its_row() -> None:
    arenas = Arenas(4)
    infinite = torch.full((1, 1, 8), torch.inf, dtype=torch.float16)
    keys, values = arenas.store(0, torch.tensor([2]), infinite, infinite * 0)
    assert torch.isfinite(keys).all()
    assert torch.isfinite(values).all()


def test_arenas_are_zeroed_and_counted() -> None:
    arenas = Arenas(4)
    keys, _ = arenas.store(0, torch.tensor([2]), torch.ones(2, 1, 8), torch.ones(2, 1, 6))
    assert keys.sum() == 16
    assert arenas.bytes == 2 * 4 * (8 + 6) * 4
    arenas.zero()
    assert keys.sum() == 0
