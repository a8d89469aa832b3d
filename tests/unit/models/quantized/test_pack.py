"""The layers of a stage that are packed, and their formats."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from penstock.core import ConfigError
from penstock.files import AUTO, FAST, NUMERICS, REFERENCE
from penstock.models.linear import (
    FloatHead,
    Int4Linear,
    Int8Linear,
    PackedLinear,
    TiedHead,
    can_pack,
    weight_bytes,
    works,
)
from penstock.models.packing import TableEmbedding, TableHead, check_covered, pack, usable
from penstock.models.stage_model import StageModel, load_stage
from penstock.stage.visibility import BatchView, RequestView
from tests.checkpoints import LAYERS, VOCAB, make_checkpoint

WIDE = 512
whole = pytest.mark.skipif(not works(), reason="this processor lacks what compiled products need")


class Odd(nn.Linear):
    """A Linear that may compute something else."""


def some_layers() -> nn.Module:
    return nn.Sequential(
        nn.Linear(WIDE, WIDE), nn.Sequential(nn.Linear(8, 8), nn.Linear(WIDE, WIDE, bias=False)), Odd(WIDE, WIDE)
    )


def kinds(module: nn.Module) -> list[type]:
    return [type(m) for m in module.modules() if not isinstance(m, nn.Sequential)]


def test_only_large_plain_linears_of_floats_are_packed() -> None:
    module = some_layers()
    before = weight_bytes(module)
    pack(module, "none")
    assert kinds(module) == [PackedLinear, nn.Linear, PackedLinear, Odd]
    assert weight_bytes(module) == before


@whole
def test_all_plain_linears_become_int8() -> None:
    module = some_layers()
    pack(module, "int8")
    assert kinds(module) == [Int8Linear, Int8Linear, Int8Linear, Odd]


@whole
def test_what_int4_does_not_take_becomes_int8(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(64, 32), nn.Linear(40, 32))
    pack(module, "int4")
    assert kinds(module) == [Int4Linear, Int8Linear]
    stage = load_stage(str(make_checkpoint(tmp_path, "llama")), 0, LAYERS, capacity=8, quantization="int4")
    assert parts(stage) == (TableEmbedding, Int8Linear)


@whole
def test_ends_are_quantized_and_tied_ones_held_once(tmp_path: Path) -> None:
    tied = load_stage(str(make_checkpoint(tmp_path / "tied", "llama_tied")), 0, LAYERS, capacity=8, quantization="int8")
    own = load_stage(str(make_checkpoint(tmp_path / "own", "llama")), 0, LAYERS, capacity=8, quantization="int8")
    assert parts(tied) == (TableEmbedding, TableHead)
    assert tied._base.embed_tokens.table is tied._causal.lm_head
    assert parts(own) == (TableEmbedding, Int8Linear)
    table = own._base.embed_tokens.table
    assert own.weight_bytes - tied.weight_bytes == table.values.nbytes + table.scales.nbytes


@pytest.mark.parametrize("numerics", NUMERICS)
def test_a_tied_head_of_floats_is_held_once(tmp_path: Path, numerics: str) -> None:
    wide = {"hidden_size": 64, "vocab_size": 4096, "num_hidden_layers": 2}
    path = str(make_checkpoint(tmp_path, "llama_tied", **wide))
    whole, plain = (load_stage(path, 0, 2, capacity=8, numerics=way) for way in (numerics, REFERENCE))
    exact = numerics != FAST and works()
    if exact:
        assert parts(whole) == (TableEmbedding, FloatHead)
        assert whole._base.embed_tokens.table is whole._causal.lm_head
    else:
        assert parts(whole) == (nn.Embedding, TiedHead if can_pack(torch.float32) else nn.Linear)
        assert whole._causal.lm_head.weight is whole._base.embed_tokens.weight
    assert whole.weight_bytes <= plain.weight_bytes
    hidden = torch.randn(5, 64)
    for rows in (1, 5):
        torch.testing.assert_close(whole.logits(hidden, range(rows)), plain.logits(hidden, range(rows)))
    last = load_stage(path, 1, 2, capacity=8, numerics=numerics)
    packed = PackedLinear if can_pack(torch.float32) else nn.Linear
    assert type(last._causal.lm_head) is (FloatHead if exact else packed)


def parts(stage: StageModel) -> tuple[type, type]:
    return type(stage._base.embed_tokens), type(stage._causal.lm_head)


@whole
def test_a_stage_holds_bytes(tmp_path: Path) -> None:
    """Four bytes of a float become one, and a scale for every output."""
    folder = str(make_checkpoint(tmp_path, "llama", hidden_size=128, intermediate_size=256))
    floats, packed = (
        load_stage(folder, 0, LAYERS, capacity=8, quantization=quantization) for quantization in ("none", "int8")
    )
    assert 0.25 * floats.weight_bytes < packed.weight_bytes < 0.3 * floats.weight_bytes


@whole
@pytest.mark.parametrize("architecture", ["mixtral", "gpt_oss"])
def test_weights_outside_of_linear_layers_are_refused(tmp_path: Path, architecture: str) -> None:
    folder = str(make_checkpoint(tmp_path, architecture))
    with pytest.raises(ConfigError, match=r"quantization: int8 is for linear layers, and \S*mlp\S* is no part of"):
        load_stage(folder, 0, LAYERS, capacity=8, quantization="int8")


def test_covered_layers_have_vectors_alone() -> None:
    check_covered(nn.ModuleList([nn.LayerNorm(8)]), "int8")
    with pytest.raises(ConfigError, match=re.escape("0.weight")):
        check_covered(nn.ModuleList([nn.Linear(8, 8)]), "int8")


def test_formats_that_can_be_used() -> None:
    assert usable("none")
    assert usable("int8") == usable("int4") == works()


@whole
def test_the_reference_path_has_the_same_weights(tmp_path: Path) -> None:
    folder = str(make_checkpoint(tmp_path, "qwen3"))
    fast, plain = (
        load_stage(folder, 0, LAYERS, capacity=8, quantization="int8", numerics=way) for way in (AUTO, REFERENCE)
    )
    rows, tokens = torch.randn(3, fast.hidden_size), torch.arange(3, VOCAB)
    joined, attention = fast._base.layers[0].qkv, plain._base.layers[0].self_attn
    apart = [linear(rows) for linear in (attention.q_proj, attention.k_proj, attention.v_proj)]
    assert torch.equal(joined(rows), torch.cat(apart, dim=-1))
    assert torch.equal(fast._causal.lm_head(rows), plain._causal.lm_head(rows))
    assert torch.equal(fast._base.embed_tokens(tokens), plain._base.embed_tokens(tokens))


@whole
@pytest.mark.parametrize("architecture", ["llama_tied", "qwen3", "gemma2"])
def test_four_bits_leave_a_row_its_own_bits_through_a_whole_stage(tmp_path: Path, architecture: str) -> None:
    folder = str(make_checkpoint(tmp_path, architecture))
    tokens = np.random.default_rng(0).integers(3, VOCAB, 24)
    found = []
    for width in (24, 1, 5):
        stage = load_stage(folder, 0, LAYERS, capacity=24, quantization="int4")
        parts = [stage.forward(rows_of(tokens[: start + width], start), None) for start in range(0, 24, width)]
        found.append(stage.logits(torch.cat(parts), range(24)))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def rows_of(tokens: np.ndarray, seen: int) -> BatchView:
    """Rows one below the other, of which the first ones are there."""
    slots = np.arange(len(tokens))
    request = RequestView(0, slots[seen:] - seen, slots, slots, np.tri(len(tokens), dtype=bool)[seen:])
    return BatchView(
        slots[seen:] * 0, slots[seen:], slots[seen:], slots[seen:], tokens[seen:], [request], slots[seen:] - 1
    )
