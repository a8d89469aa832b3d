"""Fused layers give what an architecture's own give, and replace nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from penstock.files import AUTO, REFERENCE
from penstock.messages import Rows
from penstock.models.fused import FusedBase, RMSNorm, SideBySide, joined, rms_norm
from penstock.models.stage_model import StageModel, load_stage
from tests.checkpoints import ARCHITECTURES, LAYERS, make_checkpoint
from tests.staged import Staged, chain_rows

FUSED = {"llama", "llama_tied", "llama3_rope", "mistral", "mistral_window", "qwen2", "qwen3"}
TOKENS = [17, 3, 99, 42, 8, 64, 120]


def is_fused(stage: StageModel) -> bool:
    return isinstance(stage._base, FusedBase)


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_which_architectures_are_fused(tmp_path: Path, architecture: str, dtype: str) -> None:
    path = make_checkpoint(tmp_path, architecture, initializer_range=0.1)
    stage = load_stage(str(path), 0, LAYERS, capacity=8, dtype=dtype, max_model_len=64)
    assert is_fused(stage) == (architecture in FUSED)
    assert not is_fused(load_stage(str(path), 0, LAYERS, capacity=8, dtype=dtype, numerics=REFERENCE, max_model_len=64))


@pytest.mark.parametrize("architecture", sorted(FUSED))
def test_hidden_states_of_a_tree(tmp_path: Path, architecture: str) -> None:
    """On two stages, also where rows attend to a window and to two branches."""
    path = make_checkpoint(tmp_path, architecture)
    found = []
    for plain in (False, True):
        stages = Staged(path, 2, numerics=REFERENCE if plain else AUTO)
        branches = Rows()
        for node, (token, slot) in enumerate([(5, 9), (9, 12)]):
            branches.append(0, 100 + node, slot, 6, 7, token)
        found.append([stages.run(chain_rows(0, TOKENS, range(7)), range(7), opened=[0]), stages.run(branches, [0, 1])])
    for fused, plain_ones in zip(*found, strict=True):
        torch.testing.assert_close(fused, plain_ones, atol=1e-4, rtol=1e-4)


class Scaled(LlamaDecoderLayer):
    """A layer that has the parts of llama's and computes something else."""

    def forward(self, hidden_states: torch.Tensor, **options: Any) -> torch.Tensor:
        result: torch.Tensor = 0.5 * super().forward(hidden_states, **options)
        return result


def test_a_layer_that_only_looks_like_llamas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_checkpoint(tmp_path)
    monkeypatch.setattr("transformers.models.llama.modeling_llama.LlamaDecoderLayer", Scaled)
    assert not is_fused(load_stage(str(path), 0, LAYERS, capacity=8))


def test_an_embedding_that_is_scaled(tmp_path: Path) -> None:
    """Granite's factors for the layers are neutral here; the one for the embedding is not."""
    factors = {"embedding_multiplier": 3.0, "residual_multiplier": 1.0, "attention_multiplier": 8**-0.5}
    path = make_checkpoint(tmp_path, "granite", **factors)
    assert not is_fused(load_stage(str(path), 0, LAYERS, capacity=8))
    assert is_fused(load_stage(str(path), 2, LAYERS, capacity=8))  # whose rows come from another stage


def test_keys_that_would_be_clipped(tmp_path: Path) -> None:
    """OLMo's norms have no weights. Clipping rules fusing out even if no key of the sample is clipped."""
    for clip, fused in ((None, True), (100.0, False)):
        path = make_checkpoint(tmp_path / str(clip), "olmo", clip_qkv=clip)
        assert is_fused(load_stage(str(path), 0, LAYERS, capacity=8)) == fused


def test_rotations_that_differ_between_kinds_of_layer(tmp_path: Path) -> None:
    """MiMo's layers without experts have the parts of llama's, and are told which rotation is theirs."""
    path = make_checkpoint(tmp_path, "mimo_v2_flash", mlp_layer_types=["dense"] * LAYERS)
    assert not is_fused(load_stage(str(path), 0, LAYERS, capacity=8))


@pytest.mark.parametrize("rows", [1, 2, 7, 33])
def test_joined_linears(rows: int) -> None:
    torch.manual_seed(0)
    linears = [nn.Linear(96, 64), nn.Linear(96, 32, bias=False), nn.Linear(96, 32)]
    beside = SideBySide(linears)
    whole = joined(beside)
    hidden = torch.randn(1, rows, 96)
    assert isinstance(whole, nn.Linear)
    torch.testing.assert_close(whole(hidden), beside(hidden), atol=1e-6, rtol=1e-6)


def test_linears_of_other_kinds_stay_apart() -> None:
    class Packed(nn.Linear):
        """A linear layer that holds its weight in a form of its own."""

    beside = SideBySide([nn.Linear(4, 4), Packed(4, 4)])
    assert joined(beside) is beside
    assert beside(torch.zeros(1, 2, 4)).shape == (1, 2, 8)


class Shifted(nn.Module):
    """Gemma's norm: times one plus the weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width))
        self.eps = 1e-6

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return nn.functional.rms_norm(hidden, self.weight.shape, 1 + self.weight, self.eps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e3])
def test_norms(dtype: torch.dtype, scale: float) -> None:
    torch.manual_seed(0)
    norm = nn.RMSNorm(40, eps=1e-5, dtype=dtype)
    norm.weight.data.normal_()
    found = rms_norm(norm)
    assert isinstance(found, RMSNorm)
    hidden = (torch.randn(1, 5, 40) * scale).to(dtype)
    with torch.inference_mode():
        torch.testing.assert_close(found(hidden), norm(hidden))


def test_norms_that_are_none() -> None:
    for other in (nn.LayerNorm(40), Shifted(40), nn.Identity()):
        assert rms_norm(other) is other
