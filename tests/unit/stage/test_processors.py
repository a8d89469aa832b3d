"""Masks, bias and penalties against their plain definitions, and what a drafter's ranking makes of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import RepetitionPenaltyLogitsProcessor

from penstock.messages import NO_SLOT, Batch, CommittedSlots, Opened, Rows, SampledToken, Sampling
from penstock.noise import gumbel
from penstock.stage.sampler import Context, contexts_of, pick_tokens, processed, rank_candidates
from penstock.stage.visibility import BatchView, Visibility

VOCABULARY = 12

paths = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=30)
logits = st.lists(st.integers(-40, 40), min_size=VOCABULARY, max_size=VOCABULARY).map(
    lambda values: np.array(values) / 8.0
)
samplings = st.builds(
    Sampling,
    seed=st.integers(0, 99),
    temperature=st.sampled_from([0.0, 0.0, 0.7, 1.0]),
    barred=st.sampled_from([(), (1, 3, 99)]),
    barred_before=st.integers(0, 30),
    presence_penalty=st.sampled_from([0.0, 0.5, -2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.25, 2.0]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.5]),
    logit_bias=st.sampled_from([(), ((2, 3.0), (3, -100.0))]),
    allowed_token_ids=st.sampled_from([(), (0, 3, 5, 7), (1, 3)]),
    prompt_length=st.integers(1, 10),
)


def by_definition(values: np.ndarray, sampling: Sampling, path: list[int]) -> np.ndarray:
    """Processed scores by definition, in vLLM's order: allowed, barred, bias, then the three penalties."""
    scores = [float(value) for value in values]
    output = path[sampling.prompt_length :]
    possible = set(sampling.allowed_token_ids or range(len(scores)))
    if len(path) < sampling.barred_before and possible - set(sampling.barred):
        possible -= set(sampling.barred)
    for token in range(len(scores)):
        if token not in possible:
            scores[token] = -np.inf
            continue
        scores[token] += dict(sampling.logit_bias).get(token, 0.0)
        if token in path:
            factor = sampling.repetition_penalty
            scores[token] = scores[token] / factor if scores[token] > 0 else scores[token] * factor
        scores[token] -= sampling.frequency_penalty * output.count(token)
        scores[token] -= sampling.presence_penalty * (token in output)
    return np.array(scores)


@given(logits, samplings, paths)
def test_processors_and_picks_equal_their_definition(values: np.ndarray, sampling: Sampling, path: list[int]) -> None:
    expected = by_definition(values, sampling, path)
    context = Context(np.array(path))
    np.testing.assert_allclose(processed(values, sampling, len(path), context), expected, rtol=1e-12)
    noise = gumbel(sampling.seed, 0, len(path), VOCABULARY)
    noisy = expected / sampling.temperature + noise if sampling.temperature else expected
    [pick] = pick_tokens(torch.from_numpy(values)[None], [sampling], [len(path)], [0], [context])
    assert noisy[pick.token] == pytest.approx(noisy.max(), abs=1e-12)
    [ranked] = rank_candidates(torch.from_numpy(values)[None], [sampling], [len(path)], [0], VOCABULARY, [context])
    assert ranked.tokens[0] == pick.token, "a drafter that is the target guesses the target's pick first"
    assert set(ranked.tokens) == set(np.flatnonzero(np.isfinite(expected)).tolist())


@given(logits, paths, st.sampled_from([1.3, 0.5, 2.0]))
def test_the_repetition_penalty_is_that_of_transformers(values: np.ndarray, path: list[int], factor: float) -> None:
    theirs = RepetitionPenaltyLogitsProcessor(factor)(torch.tensor([path]), torch.from_numpy(values)[None])
    ours = processed(values, Sampling(repetition_penalty=factor), len(path), Context(np.array(path)))
    np.testing.assert_allclose(ours, theirs[0].numpy())


def test_penalties_count_the_output_only_and_repetition_the_prompt_too() -> None:
    path = np.array([4, 4, 5, 5, 6])
    values = np.full(VOCABULARY, 8.0)
    counted = processed(values, Sampling(frequency_penalty=1.0, prompt_length=3), 5, Context(path))
    assert counted[[4, 5, 6, 7]].tolist() == [8.0, 7.0, 7.0, 8.0]
    seen = processed(values, Sampling(repetition_penalty=2.0, prompt_length=3), 5, Context(path))
    assert seen[[4, 5, 6, 7]].tolist() == [4.0, 4.0, 4.0, 8.0]


def test_logprobs_stay_those_of_the_model() -> None:
    values = torch.randn(1, VOCABULARY, generator=torch.Generator().manual_seed(1))
    sampling = Sampling(logprobs=2, logit_bias=((3, 50.0),), repetition_penalty=1.5)
    [pick] = pick_tokens(values, [sampling], [2], [0], [Context(np.array([1, 2]))])
    expected = torch.log_softmax(values[0].double(), -1)
    assert pick.token == 3
    assert pick.logprob == pytest.approx(float(expected[3]))
    assert [token for token, _ in pick.top] == expected.topk(2).indices.tolist()


# ------------------------------------------------------------------------------------------------------ grammars' masks


def only(*tokens: int) -> Context:
    allowed = np.zeros(VOCABULARY, dtype=bool)
    allowed[list(tokens)] = True
    return Context(np.array([1, 2, 3]), allowed)


def test_a_grammar_says_what_can_be_picked() -> None:
    values = torch.arange(VOCABULARY, dtype=torch.float32)[None]
    for temperature in (0.0, 1.0):
        sampling = Sampling(grammar="x", temperature=temperature)
        assert pick_tokens(values, [sampling], [3], [0], [only(4)])[0].token == 4
        assert set(rank_candidates(values, [sampling], [3], [0], 5, [only(4, 6)])[0].tokens) == {4, 6}


def test_barred_tokens_give_way_to_a_grammar_that_allows_nothing_else() -> None:
    """min_tokens cannot keep a text going that is complete."""
    values = torch.arange(VOCABULARY, dtype=torch.float32)[None]
    sampling = Sampling(grammar="x", barred=(2,), barred_before=100)
    assert pick_tokens(values, [sampling], [3], [0], [only(2)])[0].token == 2
    assert pick_tokens(values, [sampling], [3], [0], [only(1, 2)])[0].token == 1


def test_an_empty_mask_gives_an_error_and_no_candidates() -> None:
    values = torch.arange(VOCABULARY, dtype=torch.float32)[None]
    for temperature in (0.0, 1.0):
        sampling = Sampling(grammar="x", temperature=temperature, top_p=0.9, top_k=3, min_p=0.1, logprobs=2)
        context = replace(only(), problem="structured_outputs: it is exhausted")
        assert pick_tokens(values, [sampling], [3], [0], [context]) == [
            SampledToken(0, 0, error="structured_outputs: it is exhausted")
        ]
        assert rank_candidates(values, [sampling], [3], [0], 5, [context])[0].tokens == []


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_masks_that_leave_the_model_no_token_give_an_error(temperature: float) -> None:
    values = torch.zeros(1, VOCABULARY)
    values[0, 4:] = -torch.inf
    allowed = Sampling(temperature=temperature, allowed_token_ids=(7, 8))
    [pick] = pick_tokens(values, [allowed], [3], [0])
    assert pick.error == "allowed_token_ids: the model gives no allowed token a chance"
    [pick] = pick_tokens(values, [Sampling(temperature=temperature, grammar="x")], [3], [0], [only(7, 8)])
    assert pick.error == "structured_outputs: the model gives no allowed token a chance"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_drafter_that_knows_none_of_the_possible_tokens_proposes_none(temperature: float) -> None:
    """A draft vocabulary: the logits of what it lacks are -inf."""
    values = torch.full((1, VOCABULARY), -torch.inf)
    values[0, :4] = 1.0
    sampling = Sampling(temperature=temperature, allowed_token_ids=(7, 8))
    assert rank_candidates(values, [sampling], [3], [0], 5)[0].tokens == []
    some = Sampling(temperature=temperature, allowed_token_ids=(2, 8), repetition_penalty=1.2)
    assert rank_candidates(values, [some], [3], [0], 5, [only()])[0].tokens == [2]


# --------------------------------------------------------------------------------------- whose path a row's context is


def fed(visibility: Visibility, stream: int, rows: Rows, **header: object) -> BatchView:
    batch = Batch(stream=stream, rows=rows, alive=list(range(len(rows))), **header)
    visibility.apply_header(batch)
    return visibility.view(batch, batch.alive)


def test_a_context_is_of_the_rows_own_path() -> None:
    """Two branches below a prompt, and what comes after one of them when the other's slot has been used again."""
    visibility, sampling = Visibility(8), Sampling(presence_penalty=1.0, prompt_length=2)
    #                          prompt 5 6, below it 7 and 8, below 8 a 9; slots 0 1, 2, 3, 4
    rows = Rows([0] * 5, list(range(5)), list(range(5)), [NO_SLOT, 0, 1, 1, 3], [0, 1, 2, 2, 3], [5, 6, 7, 8, 9])
    view = fed(visibility, 0, rows, opened=[Opened(0, sampling)])
    assert [one.path.tolist() for one in contexts_of(view, (1, 2, 3, 4), [sampling] * 4, None)] == [
        [5, 6],
        [5, 6, 7],
        [5, 6, 8],
        [5, 6, 8, 9],
    ]
    again = Rows([0], [9], [2], [4], [4], [3])  # 7 is dead, its slot is taken by a 3 below the 9
    view = fed(visibility, 1, again, committed=[CommittedSlots(0, [0, 1, 3])])
    assert contexts_of(view, [0], [sampling], None)[0].path.tolist() == [5, 6, 8, 9, 3]
    assert len(contexts_of(view, [0], [Sampling()], None)[0].path) == 0, "nobody needs it"


def test_a_request_may_begin_with_slots_that_another_filled() -> None:
    visibility, sampling = Visibility(8), Sampling(repetition_penalty=2.0)
    first = Rows([0] * 3, [1, 2, 3], [4, 2, 6], [NO_SLOT, 4, 2], [0, 1, 2], [7, 8, 9])
    fed(visibility, 0, first, opened=[Opened(0, sampling)], committed=[CommittedSlots(0, [4, 2, 6])])
    row = Rows([1], [5], [0], [2], [2], [3])  # a prompt 7 8 3
    header = {"opened": [Opened(1, sampling)], "committed": [CommittedSlots(1, [4, 2])], "closed": [0]}
    view = fed(visibility, 1, row, **header)
    assert contexts_of(view, [0], [sampling], None)[0].path.tolist() == [7, 8, 3]


def test_a_request_that_was_interrupted_goes_on_with_the_same_context() -> None:
    """Closed and opened again under its number, its output so far now part of what it begins with."""
    sampling = Sampling(frequency_penalty=1.0, prompt_length=1)
    tokens = [5, 6, 6, 7]
    rows = Rows([0] * 4, [0, 1, 2, 3], [0, 1, 2, 3], [NO_SLOT, 0, 1, 2], [0, 1, 2, 3], tokens)
    whole, visibility = Visibility(8), Visibility(8)
    expected = contexts_of(fed(whole, 0, rows, opened=[Opened(0, sampling)]), [3], [sampling], None)[0]
    part = Rows([0] * 2, [0, 1], [6, 7], [NO_SLOT, 6], [0, 1], tokens[:2])
    fed(visibility, 0, part, opened=[Opened(0, sampling)])
    view = fed(visibility, 1, rows, closed=[0], opened=[Opened(0, sampling)])
    found = contexts_of(view, [3], [sampling], None)[0]
    assert found.path.tolist() == expected.path.tolist() == tokens
    scores = processed(np.zeros(VOCABULARY), sampling, 4, found)
    assert scores[[5, 6, 7]].tolist() == [0.0, -2.0, -1.0]
