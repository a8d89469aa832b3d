"""The stored figures are of every checkpoint but relatives, and say that each speculated, missed and gave way."""

from __future__ import annotations

from benchmarks.shared.measured import kept_figures
from benchmarks.strategies.families import ALL, NAME
from tests.relatives import RELATIVES

MOST_UNDECIDED = 2
"""Requests of one checkpoint that rounding may decide: now and then one, not as a rule."""


def test_every_checkpoint_has_been_compared() -> None:
    figures = kept_figures(NAME)
    assert figures.keys() <= set(ALL)
    assert set(ALL) - figures.keys() <= RELATIVES.keys(), "run python -m benchmarks.strategies.families"
    for name, found in figures.items():
        assert found["strategies"]["misses"] > 0, name
        assert found["strategies"]["dead"] > 0, name
        assert found["crowded"]["given_way"] > 0, name
        assert all(found[kind]["undecided"] <= MOST_UNDECIDED for kind in found if kind != "family"), name
