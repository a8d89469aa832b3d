"""Random histories on the hash model; ``python -m tests.histories 10000`` runs more of them."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.histories import History


@pytest.mark.parametrize("block", range(10))
def test_numbered_histories(block: int) -> None:
    for seed in range(block * 30, block * 30 + 30):
        History(random.Random(seed)).run()


@settings(max_examples=60, deadline=None)
@given(st.randoms(use_true_random=False))
def test_any_history(rng: random.Random) -> None:
    """Hypothesis chooses every draw itself, so a failure is reported as a short history."""
    History(rng).run()
