"""Picks that a GPU narrows down to few tokens are those of the whole row."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.messages import Sampling
from penstock.stage import sampler
from penstock.stage.sampler import narrowed, pick_one, rank_candidates, ranked_there, to_float64

SAMPLINGS = st.builds(
    Sampling,
    temperature=st.sampled_from([1e-6, 0.1, 0.7, 1.0, 3.0, 50.0]),
    seed=st.integers(0, 2**64 - 1),
    sample=st.integers(0, 3),
    top_k=st.sampled_from([0, 0, 1, 2, 5, 1000]),
    top_p=st.sampled_from([1.0, 1.0, 0.95, 0.5, 1e-6]),
    min_p=st.sampled_from([0.0, 0.0, 0.02, 0.5, 1.0]),
)
LOGIT = st.one_of(st.integers(-4, 4).map(float), st.floats(-30, 30, width=32), st.just(-float("inf")))


@given(data=st.data(), vocabulary=st.integers(1, 60), rows=st.integers(1, 4))
def test_a_pick_among_few_is_that_of_the_whole_row(data: st.DataObject, vocabulary: int, rows: int) -> None:
    row = st.lists(LOGIT, min_size=vocabulary, max_size=vocabulary).filter(lambda one: max(one) > -float("inf"))
    logits = torch.tensor(data.draw(st.lists(row, min_size=rows, max_size=rows)))
    samplings = data.draw(st.lists(SAMPLINGS, min_size=rows, max_size=rows))
    positions = data.draw(st.lists(st.integers(1, 2**40), min_size=rows, max_size=rows))
    found = narrowed(logits, range(rows), samplings, positions)
    for few, logits_V, sampling, position in zip(found, to_float64(logits), samplings, positions, strict=True):
        assert few is not None
        assert few.pick(sampling, position) == pick_one(logits_V, sampling, position, 0).token


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_few_tokens_are_left_of_a_large_vocabulary(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits = (3 * torch.randn(8, 100_000)).to(dtype)
    logits[:, 77] = 25.0  # as of a model that knows what comes next
    samplings = [Sampling(temperature=1.0, seed=seed, top_p=0.9 if seed % 2 else 1.0) for seed in range(8)]
    found = narrowed(logits, range(8), samplings, range(8))
    for i, (few, logits_V) in enumerate(zip(found, to_float64(logits), strict=True)):
        assert few is not None
        assert len(few.ids) < 3000
        assert few.pick(samplings[i], i) == pick_one(logits_V, samplings[i], i, 0).token


@pytest.mark.parametrize(
    "changed",
    [
        {"temperature": 0.0},
        {"logprobs": 0},
        {"logit_bias": ((3, 1.0),)},
        {"allowed_token_ids": (3, 4)},
        {"presence_penalty": 0.5},
        {"frequency_penalty": 0.5},
        {"repetition_penalty": 1.2},
        {"barred": (3,), "barred_before": 10},
        {"grammar": "root ::= [a]"},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_whatever_else_decides_takes_the_whole_row(changed: dict[str, object]) -> None:
    sampling = Sampling(**{"temperature": 1.0, **changed})  # type: ignore[arg-type]
    assert narrowed(torch.randn(1, 50), [0], [sampling], [5]) == [None]


def test_many_tokens_that_are_nearly_tied_take_the_whole_row() -> None:
    flat = torch.zeros(2, sampler.MOST_FEW + 1)
    assert narrowed(flat, [0, 1], [Sampling(temperature=1.0)] * 2, [1, 2]) == [None, None]


@given(st.lists(LOGIT, min_size=3, max_size=40).filter(lambda one: max(one) > -float("inf")), st.integers(1, 8))
def test_greedy_candidates_are_ranked_alike_on_a_device(row: list[float], count: int) -> None:
    logits = torch.tensor([row])
    (here,) = rank_candidates(logits, [Sampling()], [4], [9], count)
    (there,) = ranked_there(logits, [9], count)
    assert there.node == here.node
    np.testing.assert_allclose(there.scores, here.scores, rtol=1e-12, atol=1e-12)
