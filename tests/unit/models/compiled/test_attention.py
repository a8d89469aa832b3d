"""Attention in compiled loops: right, and the same bits wherever a row's slots are and whoever is beside it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.models.attention import Arenas, Scoring
from penstock.models.compiled.attention import CompiledAttention
from penstock.stage.visibility import BatchView, RequestView
from tests.unit.models.test_attention import CAPACITY, CPU, SCORINGS, VIEWS, Layer, expected_NHe

HEADS, GROUPS, WIDTH = 6, 2, 8


def attend(
    view: BatchView, scoring: Scoring, window: int | None = None, value_width: int = WIDTH, seed: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend from fresh rows over arenas full of other rows' numbers; returns (result, expected)."""
    torch.manual_seed(seed)
    arenas, everything = Arenas(CAPACITY), torch.arange(CAPACITY)
    full = torch.randn(GROUPS, CAPACITY, WIDTH) * 3, torch.randn(GROUPS, CAPACITY, value_width) * 100
    arenas.store(3, everything, *full)
    query, key = torch.randn(HEADS, len(view), WIDTH), torch.randn(GROUPS, len(view), WIDTH)
    value = torch.randn(GROUPS, len(view), value_width)
    options = {"scaling": scoring.scaling, "softcap": scoring.softcap, "s_aux": scoring.sinks_H}
    found = CompiledAttention(arenas, view, CPU)(Layer(), query, key, value, None, sliding_window=window, **options)
    keys, values = arenas.store(3, everything[:0], key[:, :0], value[:, :0])
    return found, expected_NHe(view, query, keys, values, scoring, window)


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())
@pytest.mark.parametrize("scoring", SCORINGS.values(), ids=SCORINGS.keys())
def test_rows_see_their_slots_and_no_others(view: BatchView, scoring: Scoring) -> None:
    found, expected = attend(view, scoring)
    torch.testing.assert_close(found.double(), expected, atol=1e-3, rtol=1e-5)


@pytest.mark.parametrize("window", [1, 3])
def test_window_counts_positions_including_the_own(window: int) -> None:
    found, expected = attend(VIEWS["three requests"], Scoring(0.3), window)
    torch.testing.assert_close(found.double(), expected, atol=1e-3, rtol=1e-5)


def test_values_may_be_narrower_than_keys() -> None:
    found, expected = attend(VIEWS["dense"], Scoring(0.3), value_width=5)
    torch.testing.assert_close(found.double(), expected, atol=1e-3, rtol=1e-5)


class Text:
    """Keys, values and queries of the positions of one text."""

    def __init__(self, length: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.key, self.value = (torch.randn(GROUPS, length, WIDTH, generator=generator) for _ in range(2))
        self.query = torch.randn(HEADS, length, WIDTH, generator=generator)

    def last_row(self, slots: np.ndarray, committed: int, beside: int) -> torch.Tensor:
        """Attend from the last position to those in ``slots``; ``beside`` rows of another request share the batch."""
        length = len(slots)
        arenas = Arenas(CAPACITY)
        torch.manual_seed(beside)
        arenas.store(3, torch.arange(CAPACITY), *(torch.randn(GROUPS, CAPACITY, WIDTH) for _ in range(2)))
        before = torch.from_numpy(slots[:-1])
        arenas.store(3, before, self.key[:, :-1], self.value[:, :-1])
        free = np.setdiff1d(np.arange(CAPACITY), slots)[:beside]
        # What is not committed stands in the order of slots, as in a stage's own view.
        order = np.concatenate([np.arange(committed), committed + np.argsort(slots[committed:])])
        one = np.ones((1, length), dtype=bool)
        views = [RequestView(0, np.array([0]), slots[order], np.arange(length)[order], one, committed)]
        if beside:
            places = np.arange(beside)
            views.append(RequestView(1, 1 + places, free, places, np.tri(beside, dtype=bool)))
        rows = np.concatenate([slots[-1:], free])
        zeros = np.zeros(len(rows), dtype=np.int64)
        view = BatchView(zeros, zeros, rows, np.concatenate([[length - 1], np.arange(beside)]), zeros, views, zeros - 1)
        query, key, value = (
            torch.cat([part[:, -1:], torch.randn(len(part), beside, WIDTH)], dim=1)
            for part in (self.query, self.key, self.value)
        )
        return CompiledAttention(arenas, view, CPU)(Layer(), query, key, value, None, scaling=0.3)[0]


@given(
    length=st.integers(2, 40),
    committed=st.integers(0, 39),
    beside=st.integers(0, 9),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_rows_bits_are_its_own(length: int, committed: int, beside: int, seed: int) -> None:
    slots = np.random.default_rng(seed).permutation(CAPACITY)[:length]
    text = Text(length, seed)
    alone = text.last_row(np.arange(length), length - 1, 0)
    assert torch.equal(text.last_row(slots, min(committed, length - 1), beside), alone)
