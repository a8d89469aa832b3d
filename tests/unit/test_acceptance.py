"""Acceptance rules: against brute force on tiny vocabularies, and against each other."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.lab import acceptance
from penstock.lab.acceptance import (
    chain_lengths,
    distributions,
    draw,
    followed_by_rejection,
    looked_up,
    noise_ranked,
    overlap,
    rejection,
    rejection_without_replacement,
    residual,
    without,
)
from tests.recordings import make_recording

MOST = 4
ROWS = 20_000


@st.composite
def pairs(draw: st.DrawFn, least: int = 2) -> tuple[np.ndarray, np.ndarray]:
    """Two distributions [1, U] over the same 2 to 5 tokens; some of either are impossible."""
    size = draw(st.integers(least, 5))
    weights = st.lists(st.integers(0, 9), min_size=size, max_size=size).filter(any)
    p, q = (np.array([draw(weights)], dtype=np.float64) for _ in range(2))
    return p / p.sum(), q / q.sum()


# --- What the algorithms put out, by enumeration: every sequence of drafts that may be rejected ---


def output_of_rejection(p: np.ndarray, q: np.ndarray, most: int) -> np.ndarray:
    """[1, U]: the distribution of the accepted token, or of the one drawn from the residual after ``most`` drafts."""
    if most == 0:
        return p
    rejected = 1 - overlap(p, q)[0]
    after = output_of_rejection(residual(p, q), q, most - 1) if rejected > 1e-12 else 0.0
    return np.minimum(p, q) + rejected * after


def output_without_replacement(p: np.ndarray, q: np.ndarray, most: int) -> tuple[np.ndarray, float]:
    """The same where the drafts are all different, and the chance that one of them is accepted."""
    if most == 0 or not q.any():
        return p, 0.0
    output, accepted = np.minimum(p, q), float(overlap(p, q)[0])
    for token in np.flatnonzero(q[0] - p[0] > 1e-12):
        chance = q[0, token] - p[0, token]
        after, then = output_without_replacement(residual(p, q), without(q, np.array([token])), most - 1)
        output, accepted = output + chance * after, accepted + chance * then
    return output, accepted


@given(pairs(), st.integers(1, MOST))
def test_rejection_sampling_of_many_drafts_is_lossless(pair: tuple[np.ndarray, np.ndarray], most: int) -> None:
    p, q = pair
    np.testing.assert_allclose(output_of_rejection(p, q, most), p, atol=1e-9)
    np.testing.assert_allclose(output_without_replacement(p, q, most)[0], p, atol=1e-9)


@given(pairs())
def test_a_single_draft_is_accepted_with_one_minus_total_variation(pair: tuple[np.ndarray, np.ndarray]) -> None:
    p, q = pair
    expected = 1 - np.abs(p - q).sum() / 2
    assert overlap(p, q)[0] == pytest.approx(expected)
    assert rejection(p, q, 1)[0, 0] == pytest.approx(expected)
    assert rejection_without_replacement(p, q, 1, np.random.default_rng(0))[0, 0] == pytest.approx(expected)


@given(pairs())
def test_more_candidates_are_never_accepted_less(pair: tuple[np.ndarray, np.ndarray]) -> None:
    p, q = pair
    best = np.take_along_axis(p, np.argsort(-q, axis=1), axis=1)
    different = rejection_without_replacement(p, q, MOST, np.random.default_rng(0))
    for chances in (rejection(p, q, MOST), different, looked_up(best, MOST)):
        assert (np.diff(chances[0]) >= -1e-12).all()
        assert (chances <= 1 + 1e-12).all()
        assert (chances >= 0).all()
    assert (rejection(p, q, MOST)[0] >= overlap(p, q)[0] - 1e-12).all()
    assert (different[0] >= overlap(p, q)[0] - 1e-12).all()


@given(pairs())
def test_a_perfect_draft_is_always_accepted(pair: tuple[np.ndarray, np.ndarray]) -> None:
    p, _ = pair
    np.testing.assert_allclose(rejection(p, p, MOST), 1.0)
    np.testing.assert_allclose(rejection_without_replacement(p, p, MOST, np.random.default_rng(0)), 1.0)


@settings(max_examples=20)
@given(pairs(least=3))
def test_different_drafts_are_estimated_without_bias(pair: tuple[np.ndarray, np.ndarray]) -> None:
    """The Monte Carlo's mean over many rows against the enumeration of all sequences of drafts."""
    p, q = pair
    many = (np.repeat(one, ROWS, axis=0) for one in (p, q))
    drawn = rejection_without_replacement(*many, MOST, np.random.default_rng(1))
    for k in range(MOST):
        expected = output_without_replacement(p, q, k + 1)[1]
        error = drawn[:, k].std() / np.sqrt(ROWS)
        assert abs(drawn[:, k].mean() - expected) <= 5 * error + 1e-9


def literal_rejection(p: np.ndarray, q: np.ndarray, different: bool, rng: np.random.Generator) -> tuple[int, int]:
    """SpecInfer's and EAGLE's algorithm as it is written: the token put out, and how many drafts were looked at."""
    p, q = p[0].copy(), q[0].copy()
    for tried in range(1, MOST + 1):
        if q.sum() == 0:
            break
        token = int(rng.choice(len(q), p=q / q.sum()))
        if rng.random() * q[token] / q.sum() < p[token]:
            return token, tried
        p = np.maximum(p - q / q.sum(), 0)
        p /= p.sum()
        if different:
            q[token] = 0
    return int(rng.choice(len(p), p=p)), MOST + 1


@pytest.mark.parametrize("different", [False, True])
def test_rules_are_those_of_the_algorithms_as_written(different: bool) -> None:
    p, q = np.array([[0.5, 0.2, 0.1, 0.2, 0.0]]), np.array([[0.05, 0.15, 0.6, 0.1, 0.1]])
    rng = np.random.default_rng(2)
    runs = [literal_rejection(p, q, different, rng) for _ in range(ROWS)]
    tokens, tried = (np.array(column) for column in zip(*runs, strict=True))
    if different:
        many = (np.repeat(one, ROWS, axis=0) for one in (p, q))
        chances = rejection_without_replacement(*many, MOST, rng).mean(axis=0)
    else:
        chances = rejection(p, q, MOST)[0]
    within = 5 * 0.5 / np.sqrt(ROWS)
    for k in range(1, MOST + 1):
        assert abs((tried <= k).mean() - chances[k - 1]) < within
    assert np.abs(np.bincount(tokens, minlength=5) / ROWS - p[0]).max() < within


def test_drafts_are_drawn_in_proportion_and_never_where_there_is_no_mass() -> None:
    mass = np.repeat([[0.0, 0.3, 0.0, 0.1, 0.0]], ROWS, axis=0)
    counts = np.bincount(draw(mass, np.random.default_rng(3)), minlength=5)
    assert counts[[0, 2, 4]].tolist() == [0, 0, 0]
    assert abs(counts[1] / ROWS - 0.75) < 5 * np.sqrt(0.75 * 0.25 / ROWS)
    assert draw(np.zeros((2, 3)), np.random.default_rng(4)).tolist() == [0, 0]


def test_a_token_is_a_hit_from_its_rank_on() -> None:
    candidates = np.array([[4, 7, 2], [7, 4, 2], [0, 1, 2]])
    assert noise_ranked(np.array([7, 7, 7]), candidates, 16).tolist() == [[0, 1, 1], [1, 1, 1], [0, 0, 0]]
    np.testing.assert_allclose(looked_up(np.array([[0.5, 0.1, 0.2]]), 2), [[0.5, 0.6]])


def test_a_chain_ends_at_its_first_rejected_draft() -> None:
    hits = np.array([1.0, 1.0, 0.0, 1.0])
    assert chain_lengths(hits, hits, 1).tolist() == [1, 1, 0, 1]
    assert chain_lengths(hits, hits, 3).tolist() == [2, 1]
    assert chain_lengths(hits, hits, 5).tolist() == []


def test_chain_lengths_by_rejection_are_right_though_the_texts_follow_the_target() -> None:
    """Against chains run as they are: accepted tokens lead to other contexts than the target's own do."""
    rng = np.random.default_rng(5)
    p = rng.dirichlet(np.ones(3), size=3)  # [token before, token]: a chain of two tokens' memory is enough
    q = rng.dirichlet(np.ones(3), size=3)
    depth = 3
    expected, state = 0.0, np.array([1.0, 0.0, 0.0])
    for _ in range(depth):
        state = state @ np.minimum(p, q)  # accepted, and with which token
        expected += state.sum()
    estimates = []
    for _ in range(ROWS):
        before, accepted, probs = 0, [], []
        for _ in range(depth):
            accepted.append(overlap(p[before], q[before]))
            token = int(rng.choice(3, p=p[before]))
            probs.append([p[before, token], q[before, token]])
            before = token
        followed = followed_by_rejection(np.array(probs))
        estimates.append(chain_lengths(np.array(accepted), followed, depth)[0])
    assert abs(np.mean(estimates) - expected) < 5 * np.std(estimates) / np.sqrt(ROWS)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.6, "top_p": 0.9, "top_k": 8}])
def test_cut_distributions_keep_the_overlap_exactly(
    sampling: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five tokens of each list and the rest in two columns, against all 24 tokens."""
    whole = make_recording((9,), **sampling)
    monkeypatch.setattr("penstock.lab.record.WIDTH", 5)
    cut = make_recording((9,), **sampling)
    rows = np.arange(9)
    full, few = distributions(whole, rows), distributions(cut, rows)
    assert cut.target_ids.shape == (9, 5)
    for one in (*full, *few):
        np.testing.assert_allclose(one.sum(axis=1), 1.0)
    np.testing.assert_allclose(overlap(*few), overlap(*full), atol=1e-6)
    assert few[0].shape == few[1].shape == (9, 12)
    assert acceptance.looked_up(cut.target_of_draft, 5) == pytest.approx(looked_up(whole.target_of_draft, 5))
