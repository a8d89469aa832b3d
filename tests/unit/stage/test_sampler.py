import msgspec
import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from penstock.core import PipelineError
from penstock.messages import Sampling
from penstock.noise import gumbel, to_gumbel
from penstock.stage import sampler
from penstock.stage.sampler import noisy_argmax, pick_above_floor, pick_tokens, rank_candidates
from tests.statistics import chi_square_p_value

# --- The plain reference: Hugging Face's own filters, or a full sort, and then an argmax ---


def huggingface_allowed(logits: np.ndarray, sampling: Sampling) -> set[int]:
    warpers = LogitsProcessorList([TemperatureLogitsWarper(sampling.temperature)])
    if sampling.top_k > 0:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p > 0:
        warpers.append(MinPLogitsWarper(sampling.min_p))
    scores = warpers(torch.zeros(1, 1, dtype=torch.long), torch.from_numpy(logits)[None])
    return set(torch.isfinite(scores[0]).nonzero()[:, 0].tolist())


def sorted_allowed(logits: np.ndarray, sampling: Sampling) -> set[int]:
    """The same, where it is said what becomes of ties: all stay at top-k, the lower id goes first at top-p."""
    mass = np.exp((logits - logits.max()) / sampling.temperature)
    order = sorted(range(len(mass)), key=lambda token: (-mass[token], token))
    if sampling.top_k > 0:
        threshold = mass[order[min(sampling.top_k, len(order)) - 1]]
        order = [token for token in order if mass[token] >= threshold]
    total, above, kept = sum(mass[order]), 0.0, []
    for token in order:
        if above < sampling.top_p * total:
            kept.append(token)
        above += mass[token]
    return {token for token in kept if mass[token] >= sampling.min_p * mass[order[0]]}


def boundary_gap(logits: np.ndarray, sampling: Sampling) -> float:
    """How far the filters are from a draw that rounding could decide either way."""
    mass = np.sort(np.exp((logits - logits.max()) / sampling.temperature))[::-1]
    ratio = 1.0 if sampling.min_p in (0, 1) else np.abs(mass / mass[0] - sampling.min_p).min()
    if sampling.top_k > 0:
        mass = mass[mass >= mass[min(sampling.top_k, len(mass)) - 1]]
    share = np.cumsum(mass) / mass.sum()
    return min(ratio, np.abs(share[:-1] - sampling.top_p).min(initial=1.0))


def noisy_scores(logits: np.ndarray, sampling: Sampling, position: int) -> np.ndarray:
    return logits / sampling.temperature + gumbel(sampling.seed, sampling.sample, position, len(logits))


def reference_pick(logits: np.ndarray, sampling: Sampling, position: int, allowed: set[int]) -> int:
    noisy = noisy_scores(logits, sampling, position)
    return max(allowed, key=lambda token: noisy[token])


def row(logits: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.asarray(logits, dtype=np.float32))[None]


def pick(logits: np.ndarray, sampling: Sampling, position: int = 0) -> int:
    return pick_tokens(row(logits), [sampling], [position], [0])[0].token


samplings = st.builds(
    Sampling,
    seed=st.integers(0, 2**63 - 1),
    sample=st.integers(0, 7),
    temperature=st.sampled_from([0.1, 0.6, 1.0, 1.7]),
    top_k=st.sampled_from([-1, 0, 1, 2, 5, 40]),
    top_p=st.sampled_from([0.01, 0.3, 0.5, 0.9, 0.99, 1.0]),
    min_p=st.sampled_from([0.0, 0.01, 0.2, 1.0]),
)
distinct_logits = st.lists(st.integers(-60, 60), min_size=1, max_size=30, unique=True).map(
    lambda values: np.array(values) / 8.0
)
tied_logits = st.lists(st.integers(-3, 3), min_size=1, max_size=30).map(lambda values: np.array(values) / 2.0)


@settings(max_examples=settings().max_examples * 3 // 2)
@given(logits=distinct_logits, sampling=samplings, position=st.integers(0, 5000))
def test_allowed_set_and_pick_equal_huggingface(logits, sampling, position):
    assume(boundary_gap(logits, sampling) > 1e-9)
    allowed = huggingface_allowed(logits, sampling)
    assert set(sampler.passing(sampler.scaled_scores(logits, sampling, position), sampling)) == allowed
    assert pick(logits, sampling, position) == reference_pick(logits, sampling, position, allowed)


@settings(max_examples=settings().max_examples * 3 // 2)
@given(logits=tied_logits, sampling=samplings, position=st.integers(0, 5000))
def test_allowed_set_and_pick_equal_a_full_sort_with_ties(logits, sampling, position):
    assume(boundary_gap(logits, sampling) > 1e-9)
    allowed = sorted_allowed(logits, sampling)
    assert set(sampler.passing(sampler.scaled_scores(logits, sampling, position), sampling)) == allowed
    assert pick(logits, sampling, position) == reference_pick(logits, sampling, position, allowed)


@settings(max_examples=settings().max_examples * 2 // 5)
@given(seed=st.integers(0, 2**32), spread=st.sampled_from([0.0, 0.1, 1.0, 4.0]), sampling=samplings)
def test_large_vocabulary_equals_a_full_sort(seed, spread, sampling):
    # More tokens than ``nucleus`` sorts at first, and with spread 0 all of them tied.
    logits = (np.random.default_rng(seed).normal(size=3000) * spread).astype(np.float32).astype(np.float64)
    assume(boundary_gap(logits, sampling) > 1e-11)
    allowed = sorted_allowed(logits, sampling)
    assert set(sampler.passing(sampler.scaled_scores(logits, sampling, 1), sampling)) == allowed
    assert pick(logits, sampling, 1) == reference_pick(logits, sampling, 1, allowed)


extreme_draws = st.sampled_from([0, 1, 2**11, 2**12, 2**63, 2**64 - 2**12, 2**64 - 1]) | st.integers(0, 2**64 - 1)
scores_and_draws = st.integers(1, 60).flatmap(
    lambda count: st.tuples(
        st.lists(st.sampled_from([-np.inf, -40.0, -2.0, 0.0]) | st.floats(-45, 0), min_size=count, max_size=count),
        st.lists(extreme_draws, min_size=count, max_size=count),
    )
)


@settings(max_examples=2 * settings().max_examples)
@given(rows=scores_and_draws)
def test_noise_that_is_left_out_changes_no_pick(rows):
    scores, draws = np.array(rows[0]), np.array(rows[1], dtype=np.uint64)
    assert noisy_argmax(scores, draws) == (scores + to_gumbel(draws)).argmax()


@settings(max_examples=settings().max_examples * 3 // 5)
@given(seed=st.integers(0, 2**32), spread=st.sampled_from([0.0, 1e-3, 1.0, 4.0, 1e3]), ties=st.booleans())
def test_noise_that_is_left_out_changes_no_pick_of_a_large_vocabulary(seed, spread, ties):
    rng = np.random.default_rng(seed)
    scores, draws = rng.normal(size=20_000) * spread, rng.integers(0, 2**64, 20_000, dtype=np.uint64)
    if ties:
        scores, draws = np.round(scores), draws >> np.uint64(60) << np.uint64(60)
    assert noisy_argmax(scores - scores.max(), draws) == (scores - scores.max() + to_gumbel(draws)).argmax()


# --- Greedy, barred tokens, log-probabilities ---


def test_greedy_takes_the_lowest_id_on_ties():
    logits = torch.tensor([[0.0, 2.0, 2.0, -1.0], [3.0, 3.0, 3.0, 3.0]])
    for sampling in (Sampling(), Sampling(logprobs=0), Sampling(barred=(3,), barred_before=9)):
        picks = pick_tokens(logits, [sampling, sampling], [4, 5], [10, 11])
        assert [(p.node, p.token) for p in picks] == [(10, 1), (11, 0)]


def test_barred_tokens_wait_for_their_position():
    logits = np.array([5.0, 9.0, 8.0, 0.0])
    for temperature in (0.0, 0.01):
        sampling = Sampling(temperature=temperature, barred=(1, 2, 77), barred_before=6)
        assert [pick(logits, sampling, position) for position in (4, 5, 6, 7)] == [0, 0, 1, 1]
        ranked = rank_candidates(row(logits), [sampling], [5], [0], 4)[0]
        assert ranked.tokens == [0, 3]


def test_a_request_cannot_bar_every_token():
    sampling = Sampling(temperature=1.0, top_p=0.5, barred=(0, 1, 2), barred_before=9)
    assert pick(np.array([0.0, 9.0, 0.0]), sampling) == 1


def test_a_barred_token_takes_its_mass_with_it():
    # Without token 0, tokens 1 and 2 hold 0.8 of the mass: top-p 0.5 keeps both, where with it they would be out.
    logits = np.log([0.5, 0.2, 0.2, 0.05, 0.05])
    sampling = Sampling(temperature=1.0, top_p=0.5, barred=(0,), barred_before=1)
    assert {pick(logits, msgspec.structs.replace(sampling, seed=seed)) for seed in range(60)} == {1, 2}


def test_logprobs_are_of_the_raw_distribution():
    logits = np.array([1.0, 3.0, 2.0, 2.0, -np.inf], dtype=np.float32)
    expected = torch.log_softmax(torch.from_numpy(logits).double(), -1).numpy()
    sampling = Sampling(seed=1, temperature=0.3, top_k=2, logprobs=3, barred=(1,), barred_before=1)
    chosen = pick_tokens(row(logits), [sampling], [0], [5])[0]
    assert chosen.token in (2, 3)
    assert chosen.rank == 2
    assert chosen.logprob == pytest.approx(expected[chosen.token])
    assert chosen.top == [(token, pytest.approx(expected[token])) for token in (1, 2, 3)]
    greedy = pick_tokens(row(logits), [Sampling(logprobs=0)], [0], [5])[0]
    assert (greedy.token, greedy.rank, greedy.top) == (1, 1, [])
    assert len(pick_tokens(row(logits), [Sampling(logprobs=20)], [0], [5])[0].top) == 5
    assert pick_tokens(row(logits), [Sampling(temperature=1.0)], [0], [5])[0].rank == 0


def test_a_row_does_not_depend_on_the_rows_beside_it():
    logits = torch.randn(6, 500, generator=torch.Generator().manual_seed(0)) * 3
    rows = [
        Sampling(),
        Sampling(temperature=1.0, seed=1),
        Sampling(temperature=0.6, top_p=0.9, top_k=80, seed=1),
        Sampling(logprobs=4),
        Sampling(temperature=1.3, min_p=0.05, sample=1, logprobs=0),
        Sampling(),
    ]
    positions, nodes = [3, 3, 4, 5, 900, 0], [9, 8, 7, 6, 5, 4]
    together = pick_tokens(logits, rows, positions, nodes)
    alone = [pick_tokens(logits[i : i + 1], rows[i : i + 1], [positions[i]], [nodes[i]])[0] for i in range(6)]
    assert together == alone
    ranked = rank_candidates(logits, rows, positions, nodes, 8)
    assert ranked == [
        rank_candidates(logits[i : i + 1], rows[i : i + 1], [positions[i]], [nodes[i]], 8)[0] for i in range(6)
    ]


def test_picks_can_be_sent_whatever_the_columns_are():
    logits, rows = torch.randn(2, 9), [Sampling(), Sampling(temperature=1.0, logprobs=2)]
    columns = np.array([4, 5])
    picks = pick_tokens(logits, rows, columns, columns)
    ranked = rank_candidates(logits, rows, columns, columns, 3)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode((picks, ranked)))
    assert pick_tokens(logits[:0], [], [], []) == rank_candidates(logits[:0], [], [], [], 3) == []


def test_a_tiny_temperature_is_nearly_greedy():
    logits = np.array([1.0, 1.0001, -1e30, -np.inf])
    assert pick(logits, Sampling(temperature=1e-310)) == 1
    assert pick(logits, Sampling(temperature=1e-310, top_p=0.5, min_p=0.5)) == 1


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0, top_p=0.9)])
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_are_refused(sampling, poison):
    logits = torch.zeros(3, 5)
    logits[1, 2] = poison
    for ask in (pick_tokens, lambda *given: rank_candidates(*given, 2)):
        with pytest.raises(PipelineError, match=r"nodes \[21\]"):
            ask(logits, [sampling] * 3, [0, 1, 2], [20, 21, 22])
    with pytest.raises(PipelineError, match="finite"):
        pick_tokens(torch.full((1, 4), -torch.inf), [sampling], [0], [0])


def test_bfloat16_logits_pick_as_their_float32_values():
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(1)).bfloat16()
    rows, positions = [Sampling(temperature=0.8, top_p=0.9, seed=s) for s in range(4)], [0, 1, 2, 3]
    assert pick_tokens(logits, rows, positions, positions) == pick_tokens(logits.float(), rows, positions, positions)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_logits_pick_the_same():
    logits = torch.randn(8, 4096, generator=torch.Generator().manual_seed(1))
    rows = [Sampling(), Sampling(temperature=1.0, top_p=0.9)] * 4
    positions = list(range(8))
    assert pick_tokens(logits.cuda(), rows, positions, positions) == pick_tokens(logits, rows, positions, positions)


# --- The drafter's ranking ---


def test_greedy_candidates_are_the_best_logits():
    logits = np.array([0.5, 4.0, 1.0, 4.0, 2.0])
    ranked = rank_candidates(row(logits), [Sampling()], [0], [3], 4)[0]
    assert (ranked.node, ranked.tokens) == (3, [1, 3, 4, 2])
    assert ranked.scores == pytest.approx(torch.log_softmax(torch.tensor(logits), -1)[ranked.tokens].tolist())


@settings(max_examples=2 * settings().max_examples)
@given(logits=distinct_logits, sampling=samplings, position=st.integers(0, 99), count=st.integers(1, 40))
def test_candidates_rank_by_noisy_score_less_the_penalty(logits, sampling, position, count):
    assume(boundary_gap(logits, sampling) > 1e-9)
    allowed, noisy = huggingface_allowed(logits, sampling), noisy_scores(logits, sampling, position)
    noisy -= [0.0 if token in allowed else sampler.OUTSIDE_PENALTY for token in range(len(logits))]
    order = np.argsort(-noisy)[:count]
    ranked = rank_candidates(row(logits), [sampling], [position], [0], count)[0]
    assert ranked.tokens == order.tolist()
    assert ranked.scores == pytest.approx(torch.log_softmax(torch.tensor(noisy), -1)[order].tolist(), abs=1e-9)


@given(logits=distinct_logits, sampling=samplings, position=st.integers(0, 99))
def test_a_drafter_that_is_the_target_is_right_unless_an_excluded_token_is_far_ahead(logits, sampling, position):
    token = pick(logits, sampling, position)
    first = rank_candidates(row(logits), [sampling], [position], [0], 1)[0].tokens[0]
    noisy = noisy_scores(logits, sampling, position)
    assert first == token or noisy[first] - noisy[token] > sampler.OUTSIDE_PENALTY - 1e-6


def test_shared_noise_finds_the_target_more_often_than_its_best_guesses_do():
    generator = torch.Generator().manual_seed(0)
    target = torch.randn(400, 200, generator=generator) * 2
    draft = target + torch.randn(400, 200, generator=generator) * 0.7
    rows, positions = [Sampling(temperature=1.0, seed=5)] * 400, list(range(400))
    picks = pick_tokens(target, rows, positions, positions)

    def found(ranked):
        return np.mean([p.token in r.tokens for p, r in zip(picks, ranked, strict=True)])

    noisy = found(rank_candidates(draft, rows, positions, positions, 4))
    plain = found(rank_candidates(draft, [Sampling()] * 400, positions, positions, 4))
    assert noisy > 0.85 > 0.65 > plain


# --- Statistics: picks over many seeds against the exact distribution, and samplers that are wrong ---

VOCABULARY = 120
SEEDS = 12000
BIGRAMS = np.random.default_rng(7).normal(size=(VOCABULARY, VOCABULARY)) * 1.5
"""[V, V] float64: logits of the second token after each first one."""

SETTINGS = [
    Sampling(temperature=1.0),
    Sampling(temperature=0.6, top_p=0.9, top_k=80),
    Sampling(temperature=1.4, top_k=7),
    Sampling(temperature=1.0, min_p=0.1),
    Sampling(temperature=1.0, top_p=0.3),
]


def exact(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    allowed = sorted(sorted_allowed(logits, sampling))
    probabilities = np.zeros(len(logits))
    probabilities[allowed] = torch.softmax(torch.tensor(logits[allowed] / sampling.temperature), -1).numpy()
    return probabilities


def draw(logits: torch.Tensor, sampling: Sampling, position: int) -> np.ndarray:
    """One token per row of ``logits`` [SEEDS, V], each with a seed of its own."""
    rows = [msgspec.structs.replace(sampling, seed=seed) for seed in range(SEEDS)]
    return np.array([p.token for p in pick_tokens(logits, rows, [position] * SEEDS, range(SEEDS))])


def first_p_value(sampling: Sampling) -> float:
    first = draw(torch.tensor(BIGRAMS[0], dtype=torch.float32).expand(SEEDS, -1), sampling, 3)
    return chi_square_p_value(np.bincount(first, minlength=VOCABULARY), exact(BIGRAMS[0], sampling))


def pair_p_value(sampling: Sampling, second_position: int) -> float:
    """Eight tokens only, so that all pairs have counts to test."""
    bigrams = BIGRAMS[:8, :8]
    first = draw(torch.tensor(bigrams[0], dtype=torch.float32).expand(SEEDS, -1), sampling, 3)
    second = draw(torch.tensor(bigrams, dtype=torch.float32)[first], sampling, second_position)
    counts = np.bincount(first * 8 + second, minlength=64).reshape(8, 8)
    transitions = np.stack([exact(logits, sampling) for logits in bigrams])
    return chi_square_p_value(counts, exact(bigrams[0], sampling)[:, None] * transitions)


def described(sampling: Sampling) -> str:
    return f"T{sampling.temperature}-p{sampling.top_p}-k{sampling.top_k}-min{sampling.min_p}"


@pytest.mark.parametrize("sampling", SETTINGS, ids=described)
def test_single_tokens_follow_the_exact_distribution(sampling):
    assert first_p_value(sampling) > 0.01


@pytest.mark.parametrize("sampling", SETTINGS, ids=described)
def test_the_stated_distribution_is_the_exact_one(sampling):
    np.testing.assert_allclose(sampler.distribution(BIGRAMS[0], sampling, 3), exact(BIGRAMS[0], sampling), atol=1e-12)


def test_the_stated_distribution_leaves_out_barred_tokens_and_is_the_models_own_when_greedy():
    logits = np.log([0.5, 0.25, 0.25])
    barring = Sampling(top_k=1, barred=(0,), barred_before=6)
    assert sampler.distribution(logits, barring, 5) == pytest.approx([0.0, 0.5, 0.5])
    assert sampler.distribution(logits, barring, 6) == pytest.approx([0.5, 0.25, 0.25])


# Positions have noise of their own before any filter sees it, so that the other filters only sample the same.
@pytest.mark.parametrize(
    "sampling",
    [SETTINGS[0], *(pytest.param(one, marks=pytest.mark.whole) for one in SETTINGS[1:3])],
    ids=described,
)
def test_consecutive_pairs_follow_the_exact_distribution(sampling):
    assert pair_p_value(sampling, second_position=4) > 0.01


def test_noise_shared_by_two_positions_is_caught():
    assert pair_p_value(SETTINGS[0], second_position=3) < 1e-9


def test_noise_of_the_wrong_scale_is_caught(monkeypatch):
    monkeypatch.setattr(sampler, "to_gumbel", lambda draws: 1.15 * to_gumbel(draws))
    assert first_p_value(SETTINGS[0]) < 1e-9


def test_noise_of_the_wrong_shape_is_caught(monkeypatch):
    monkeypatch.setattr(sampler, "to_gumbel", lambda draws: -to_gumbel(~draws))
    assert first_p_value(SETTINGS[0]) < 1e-9


def test_top_p_that_counts_the_token_itself_is_caught(monkeypatch):
    def wrong(scores, draws, sampling):
        order = np.argsort(-scores)
        mass = np.exp(scores[order])
        kept = order[np.cumsum(mass) <= sampling.top_p * mass.sum()]
        return int(kept[(scores + to_gumbel(draws))[kept].argmax()])

    right = Sampling(temperature=0.6, top_p=0.9)
    assert first_p_value(right) > 0.01
    monkeypatch.setattr(sampler, "pick_noisy", wrong)
    assert first_p_value(right) < 1e-9


def test_top_p_of_a_mass_that_is_not_renormalised_is_caught(monkeypatch):
    def wrong(scores, draws, sampling):
        order = np.argsort(-scores)
        mass = np.exp(scores[order])
        kept = order[(np.cumsum(mass) - mass < sampling.top_p * mass.sum()) & (np.arange(len(mass)) < sampling.top_k)]
        return int(kept[(scores + to_gumbel(draws))[kept].argmax()])

    right = Sampling(temperature=1.4, top_k=7, top_p=0.6)
    assert first_p_value(right) > 0.01
    monkeypatch.setattr(sampler, "pick_noisy", wrong)
    assert first_p_value(right) < 1e-9


@pytest.mark.parametrize("fields", [{"min_p": 2.0}, {"top_p": 0.0}, {"top_p": float("nan")}])
def test_filters_that_nothing_passes_end_with_the_best_token(fields: dict[str, float]) -> None:
    sampling = Sampling(**{"temperature": 1.0, "top_p": 0.5, **fields})  # type: ignore[arg-type]
    scores_V = np.array([-1.0, 0.0, -2.0])
    assert pick_above_floor(scores_V, np.zeros(3, dtype=np.uint64), sampling) == 1
