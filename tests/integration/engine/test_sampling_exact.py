"""Sampling through a speculating pipeline follows the model's own distribution: chi-square over fixed seeds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from penstock.messages import Sampling
from penstock.noise import draws, to_gumbel
from penstock.strategies.pipedec import StaticTree
from tests.checkpoints import make_checkpoint
from tests.engines import InProcessEngine, Picks
from tests.statistics import chi_square_p_value

VOCABULARY = 12
SEEDS = 1500
PROMPT = [3, 7, 5, 5]
SETTINGS = {
    "T=1": Sampling(temperature=1.0),
    "T=0.6, top-p 0.9, top-k 8": Sampling(temperature=0.6, top_p=0.9, top_k=8),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("target"), "llama", vocab_size=VOCABULARY, num_hidden_layers=2)


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("draft")
    return make_checkpoint(folder, "llama", vocab_size=VOCABULARY, num_hidden_layers=1)


def sample_pairs(target: Path, draft: Path, sampling: Sampling) -> tuple[np.ndarray, int]:
    """Counts [V, V] of the first two tokens over all seeds, and how many of them had been drafted."""
    engine = InProcessEngine(target, 2, draft, slots=4096)
    requests = [
        engine.submit(PROMPT, Sampling(**{**named(sampling), "seed": seed}), 3, StaticTree(8, 2, 4))
        for seed in range(SEEDS)
    ]
    engine.run()
    counts = np.zeros((VOCABULARY, VOCABULARY))
    for request in requests:
        assert isinstance(request.output, Picks)
        first, second, _ = request.output.tokens
        counts[first, second] += 1
    return counts, sum(request.metrics.accepted for request in requests)


def named(sampling: Sampling) -> dict[str, object]:
    return {name: getattr(sampling, name) for name in sampling.__struct_fields__}


def exact_pairs(target: Path, sampling: Sampling) -> np.ndarray:
    """Probabilities [V, V] of the first two tokens, from transformers and a full sort."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    prompts = [PROMPT, *[[*PROMPT, token] for token in range(VOCABULARY)]]
    rows = []
    for prompt in prompts:
        with torch.inference_mode():
            logits = model(torch.tensor([prompt])).logits[0, -1].double().numpy()
        rows.append(filtered(logits, sampling))
    return rows[0][:, None] * np.stack(rows[1:])


def filtered(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    """Temperature, top-k, top-p by definition."""
    order = np.argsort(-logits)
    weights = np.exp((logits - logits.max()) / sampling.temperature)
    weights[order[sampling.top_k or len(order) :]] = 0
    probabilities = weights / weights.sum()
    above = np.cumsum(probabilities[order]) - probabilities[order]
    probabilities[order[above >= sampling.top_p]] = 0
    return probabilities / probabilities.sum()


@pytest.mark.parametrize("setting", ["T=0.6, top-p 0.9, top-k 8", pytest.param("T=1", marks=pytest.mark.whole)])
def test_tokens_and_pairs_follow_the_exact_distribution(setting: str, target: Path, draft: Path) -> None:
    counts, accepted = sample_pairs(target, draft, SETTINGS[setting])
    exact = exact_pairs(target, SETTINGS[setting])
    assert accepted > SEEDS / 4, "the pipeline has to speculate for this to mean anything"
    assert chi_square_p_value(counts.sum(1), exact.sum(1)) > 1e-3
    assert chi_square_p_value(counts, exact) > 1e-3


def one_noise_for_all_positions(seed: int, sample: int, position: int, vocabulary: int) -> np.ndarray:
    return draws(seed, sample, 0, vocabulary)


def half_the_noise(drawn: np.ndarray) -> np.ndarray:
    return to_gumbel(drawn) / 2


@pytest.mark.parametrize(
    ("part", "broken"),
    [
        ("draws", one_noise_for_all_positions),
        pytest.param("to_gumbel", half_the_noise, marks=pytest.mark.whole),
    ],
)
def test_a_broken_sampler_fails_the_same_test(
    part: str, broken: Callable[..., np.ndarray], target: Path, draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"penstock.stage.sampler.{part}", broken)
    counts, _ = sample_pairs(target, draft, SETTINGS["T=1"])
    assert chi_square_p_value(counts, exact_pairs(target, SETTINGS["T=1"])) < 1e-6
