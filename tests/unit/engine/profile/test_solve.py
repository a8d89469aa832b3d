"""The estimator finds the times that made measured stages: exactly without noise, within the noise with it."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from penstock.config import FieldError
from penstock.engine.profile.solve import Solved, layer_times, parts_of, solved

LAYER_MS = st.floats(2.0, 10.0)
"""Kinds of a model differ by up to 5 times: Nemotron-H's by 4."""
PATTERNS = st.sampled_from(
    [(0,) * 6, (0, 0, 0, 1) * 3, (0, 1, 0, 1, 0, 1, 2, 1) * 2, (0, 0, 0, *[1] * 9), (0, 1, 1, 1, 0), (1, 0, 0, 2, 0, 0)]
)


def stage_ms(truth: Solved, kinds: tuple[int, ...], layers: range, context: int) -> float:
    head = truth.head if layers.stop == len(kinds) else 0.0
    return float(truth.stage + sum(truth.kinds[kinds[layer], context] for layer in layers) + head)


def stages_of(truth: Solved, kinds: tuple[int, ...], parts: list[range]) -> np.ndarray:
    """[contexts, stages] milliseconds."""
    contexts = range(truth.kinds.shape[1])
    return np.array([[stage_ms(truth, kinds, part, context) for part in parts] for context in contexts])


@st.composite
def models(draw: st.DrawFn) -> tuple[tuple[int, ...], Solved]:
    """Kinds of layers, and what they take behind two lengths of text."""
    kinds = draw(PATTERNS)
    each = [[draw(LAYER_MS), draw(LAYER_MS)] for _ in range(max(kinds) + 1)]
    return kinds, Solved(np.array(each), draw(st.floats(0, 5)), draw(st.floats(0, 40)))


@given(models(), st.integers(2, 99))
def test_times_without_noise_are_found(model: tuple[tuple[int, ...], Solved], most: int) -> None:
    kinds, truth = model
    parts = [range(*part) for part in parts_of(kinds, most)]
    found = solved(stages_of(truth, kinds, parts).tolist(), parts, kinds)
    assert found.kinds == pytest.approx(truth.kinds, rel=1e-5, abs=1e-5)
    assert (found.stage, found.head) == pytest.approx((truth.stage, truth.head), rel=1e-5, abs=1e-5)


@given(models(), st.integers(0, 2**32 - 1))
def test_every_stage_is_predicted_within_the_noise(model: tuple[tuple[int, ...], Solved], seed: int) -> None:
    """Half of all stages that the model may be cut into are missed by no more than twice what the measured ones are
    off, and none by much more."""
    kinds, truth = model
    noise, parts = 0.03, [range(*part) for part in parts_of(kinds, len(kinds))]
    off = np.random.default_rng(seed).uniform(1 - noise, 1 + noise, (truth.kinds.shape[1], len(parts)))
    found = solved((stages_of(truth, kinds, parts) * off).tolist(), parts, kinds)
    ranges = [range(first, last) for first, last in combinations(range(len(kinds) + 1), 2)]
    error = np.array(stages_of(found, kinds, ranges)) / stages_of(truth, kinds, ranges) - 1
    assert np.abs(error).max() < 6 * noise
    assert np.median(np.abs(error)) < 2 * noise


@given(st.data())
def test_no_time_is_negative_and_no_layer_free_whatever_was_measured(data: st.DataObject) -> None:
    kinds = data.draw(PATTERNS)
    parts = [range(*part) for part in parts_of(kinds, data.draw(st.integers(1, 20)))]
    times = st.lists(st.floats(0, 1e4), min_size=len(parts), max_size=len(parts))
    grid = [[data.draw(times), data.draw(times)] for _ in range(2)]
    found = layer_times(grid, parts, kinds, (1, 4), (0, 512))  # refuses times below 0 itself
    assert min(ms for row in found.layer_ms for ms in row) > 0, "plans divide by it"
    assert len(found.kind_ms) == (len(set(kinds)) if len(set(kinds)) > 1 else 0)


@given(models(), LAYER_MS)
def test_kinds_that_take_the_same_get_equal_times(model: tuple[tuple[int, ...], Solved], each: float) -> None:
    kinds, truth = model
    assume(max(kinds))
    truth = truth._replace(kinds=np.full_like(truth.kinds, each))
    parts = [range(*part) for part in parts_of(kinds, len(kinds))]
    found = solved(stages_of(truth, kinds, parts).tolist(), parts, kinds)
    assert found.kinds == pytest.approx(np.full_like(truth.kinds, each), rel=1e-5)


def test_layers_that_share_no_stage_have_all_of_its_time() -> None:
    """Where memory holds stages of one layer alone, nothing tells a stage's own time."""
    kinds = (0, 1, 0, 0)
    parts = [range(*part) for part in parts_of(kinds, 1)]
    found = solved([[3.0, 3.0, 5.0, 3.0, 9.0]], parts, kinds)
    assert found.kinds.ravel() == pytest.approx([3, 5], rel=1e-3)
    assert (found.stage, found.head) == pytest.approx((0, 6), abs=1e-3)


def test_a_kind_of_the_last_layer_alone_takes_what_others_do() -> None:
    kinds = (0, 0, 0, 0, 0, 1)
    parts = [range(*part) for part in parts_of(kinds, 9)]
    for last, wanted in ((12.0, (2, 7)), (4.0, (1, 0))):
        found = solved([[5.0, 5.0, 3.0 + 2 * len(parts[-2]), last]], parts, kinds)
        assert found.kinds.ravel() == pytest.approx([2, wanted[0]], rel=1e-3)
        assert (found.stage, found.head) == pytest.approx((3, wanted[1]), abs=1e-2)


def test_the_stages_are_the_ends_a_layer_of_each_kind_and_as_many_as_fit() -> None:
    assert parts_of([0] * 30, 99) == ((0, 1), (1, 2), (2, 29), (29, 30))
    assert parts_of([0] * 30, 5) == ((0, 1), (1, 2), (2, 7), (29, 30))
    assert parts_of([0] * 4, 0) == ((0, 1), (1, 2), (2, 3), (3, 4))
    assert parts_of([0, 0, 0, 1] * 3, 99) == ((0, 1), (1, 2), (3, 4), (2, 11), (11, 12))
    assert parts_of([1, 0, 0, 0, 2], 99) == ((0, 1), (1, 2), (2, 4), (4, 5))
    with pytest.raises(FieldError, match="model has 3 layers; a profile takes 4"):
        parts_of([0] * 3, 1)
