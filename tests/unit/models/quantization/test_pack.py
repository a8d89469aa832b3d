"""What of a stage is packed, and as what."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from penstock.core import ConfigError
from penstock.models.quantization.floats import PackedLinear
from penstock.models.quantization.int8 import Int8Linear, largest_value
from penstock.models.quantization.pack import check_covered, pack, usable
from penstock.models.quantization.packed import weight_bytes
from penstock.models.quantization.table import TableEmbedding, TableHead
from penstock.models.stage_model import StageModel, load_stage
from tests.checkpoints import LAYERS, make_checkpoint

WIDE = 512
int8 = pytest.mark.skipif(largest_value() is None, reason="oneDNN multiplies no int8 on this processor")


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


@int8
def test_all_plain_linears_become_int8() -> None:
    module = some_layers()
    pack(module, "int8")
    assert kinds(module) == [Int8Linear, Int8Linear, Int8Linear, Odd]


@int8
def test_ends_are_quantized_and_tied_ones_held_once(tmp_path: Path) -> None:
    tied = load_stage(str(make_checkpoint(tmp_path / "tied", "llama_tied")), 0, LAYERS, capacity=8, quantization="int8")
    own = load_stage(str(make_checkpoint(tmp_path / "own", "llama")), 0, LAYERS, capacity=8, quantization="int8")
    assert parts(tied) == (TableEmbedding, TableHead)
    assert tied._base.embed_tokens.table is tied._causal.lm_head.table
    assert parts(own) == (TableEmbedding, Int8Linear)
    table = own._base.embed_tokens.table
    assert own.weight_bytes - tied.weight_bytes == table.values.nbytes + table.scales.nbytes


def parts(stage: StageModel) -> tuple[type, type]:
    return type(stage._base.embed_tokens), type(stage._causal.lm_head)


@int8
def test_a_stage_holds_bytes(tmp_path: Path) -> None:
    """Four bytes of a float become one, and a scale for every output."""
    folder = str(make_checkpoint(tmp_path, "llama", hidden_size=128, intermediate_size=256))
    floats, packed = (
        load_stage(folder, 0, LAYERS, capacity=8, quantization=quantization) for quantization in ("none", "int8")
    )
    assert 0.25 * floats.weight_bytes < packed.weight_bytes < 0.3 * floats.weight_bytes


@int8
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
    assert usable("int8") == (largest_value() is not None)


@int8
def test_the_reference_path_has_the_same_weights(tmp_path: Path) -> None:
    folder = str(make_checkpoint(tmp_path, "qwen3"))
    fast, plain = (load_stage(folder, 0, LAYERS, capacity=8, quantization="int8", plain=way) for way in (False, True))
    hidden = torch.randn(1, fast.hidden_size)
    torch.testing.assert_close(fast.logits(hidden, [0]), plain.logits(hidden, [0]))
