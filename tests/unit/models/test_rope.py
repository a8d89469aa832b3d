"""Rotary embeddings that depend on the length of the text are pinned, or refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from penstock.core import ConfigError
from penstock.models.stage_model import load_stage
from tests.checkpoints import LAYERS, make_checkpoint
from tests.staged import Staged, chain_rows

ORIGINAL = 16
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [2.0, 3.0, 4.0, 5.0],
    "factor": 4.0,
    "original_max_position_embeddings": ORIGINAL,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}


@pytest.fixture(scope="module")
def phi3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(
        tmp_path_factory.mktemp("longrope"),
        "phi3",
        max_position_embeddings=64,
        original_max_position_embeddings=ORIGINAL,
        rope_parameters=LONGROPE,
    )


@pytest.fixture(scope="module")
def dynamic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(
        tmp_path_factory.mktemp("dynamic"), max_position_embeddings=ORIGINAL, rope_parameters=DYNAMIC
    )


def errors(path: Path, length: int, max_model_len: int) -> tuple[float, float]:
    """How far our logits after ``length`` tokens, and those of transformers for this text alone, are from its logits in
    float64: how much a text magnifies the rounding of float32 differs by a factor of ten."""
    tokens = [(7 * i) % 150 + 3 for i in range(length)]

    def reference(dtype: torch.dtype) -> torch.Tensor:
        with torch.inference_mode():
            return AutoModelForCausalLM.from_pretrained(path, dtype=dtype)(torch.tensor([tokens])).logits[0, -1]

    staged = Staged(path, 2, max_model_len=max_model_len)
    logits = staged.run(chain_rows(0, tokens, range(length)), [length - 1], opened=[0])
    exact = reference(torch.float64)
    ours, theirs = ((found - exact).abs().max().item() for found in (logits[0], reference(torch.float32)))
    return ours, theirs


def test_length_dependent_rope_needs_max_model_len(phi3: Path, dynamic: Path) -> None:
    for path in (phi3, dynamic):
        with pytest.raises(ConfigError, match="set max_model_len"):
            load_stage(str(path), 0, LAYERS, capacity=8)


@pytest.mark.parametrize(("length", "max_model_len"), [(10, ORIGINAL), (30, 64)])
def test_pinned_longrope_is_that_of_transformers(phi3: Path, length: int, max_model_len: int) -> None:
    ours, theirs = errors(phi3, length, max_model_len)
    assert ours < 4 * theirs < 1e-3


def test_pinned_longrope_does_not_depend_on_the_text(phi3: Path) -> None:
    ours, _ = errors(phi3, 10, max_model_len=64)
    assert ours > 1e-2


@pytest.mark.parametrize(("length", "max_model_len"), [(10, ORIGINAL), (40, 40)])
def test_pinned_dynamic_rope_is_that_of_transformers(dynamic: Path, length: int, max_model_len: int) -> None:
    ours, theirs = errors(dynamic, length, max_model_len)
    assert ours < 4 * theirs < 1e-3
