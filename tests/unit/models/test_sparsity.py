"""Gemma 3n: cutoffs of sparse feed-forwards that give transformers' own bits, and a table of layers' embeddings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.models.gemma3n.modeling_gemma3n import Gemma3nTextMLP

from penstock.files import AUTO, REFERENCE
from penstock.models.carried import Cutoff, keep_cutoffs
from penstock.models.stage_model import load_stage
from penstock.stage.visibility import view_of
from tests.checkpoints import VOCAB, make_checkpoint, settings_of


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 7])
def test_the_same_bits(dtype: torch.dtype, rows: int) -> None:
    config = AutoConfig.for_model(**settings_of("gemma3n"))
    feed = Gemma3nTextMLP(config, layer_idx=0).to(dtype)
    gate = torch.randn(1, rows, config.intermediate_size[0], dtype=dtype)
    assert torch.equal(Cutoff(feed.activation_sparsity)(gate), feed._gaussian_topk(gate))


def test_only_sparse_layers_have_one(tmp_path: Path) -> None:
    target = str(make_checkpoint(tmp_path, "gemma3n"))
    for numerics, expected in ((AUTO, [True, True, False]), (REFERENCE, [False] * 3)):
        stage = load_stage(target, 0, 3, capacity=8, numerics=numerics, max_model_len=8)
        assert [hasattr(layer.mlp, "cutoff") for layer in stage._base.layers[:3]] == expected


def test_another_cutoff_is_left_as_it_is() -> None:
    class Layer:
        mlp = Gemma3nTextMLP(AutoConfig.for_model(**settings_of("gemma3n")), layer_idx=0)

    Layer.mlp._gaussian_topk = lambda inputs: inputs
    keep_cutoffs([Layer])
    assert not hasattr(Layer.mlp, "cutoff")


@pytest.mark.parametrize("name", ["gemma3n", "gemma4_shared"])
def test_tokens_beyond_the_table_of_layers_are_looked_up_as_the_first(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers before 5.23 fails for them."""
    stage = load_stage(str(make_checkpoint(tmp_path, name)), 0, 2, capacity=8, max_model_len=8)
    base: Any = stage._base
    table, asked = stage.checkpoint.config.vocab_size_per_layer_input, []
    own = base.base.get_per_layer_inputs
    monkeypatch.setattr(
        base.base, "get_per_layer_inputs", lambda tokens, **rest: asked.append(tokens.tolist()) or own(tokens, **rest)
    )
    tokens = [0, table - 1, VOCAB - 1]
    stage.forward(view_of(tokens, range(3)), None)
    assert asked == [[[token if token < table else 0 for token in tokens]]]
