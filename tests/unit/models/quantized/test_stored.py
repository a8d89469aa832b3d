"""Weights that their file has in four bits are packed as it has them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor, nn

from penstock.checkpoint.checkpoint import open_checkpoint
from penstock.checkpoint.tensors import GroupedWeight
from penstock.files import AUTO, REFERENCE
from penstock.models.fused import SideBySide, joined
from penstock.models.linear import Int4Linear, from_zero, in_four_bits, read_later, stored_rows, works
from penstock.models.loader import load_whole
from penstock.models.stage_model import load_stage
from tests.checkpoints import LAYERS
from tests.gguf_files import make_gguf
from tests.linears import linear_of, stored
from tests.packed_checkpoints import by_awq, by_gptq, compressed

pytestmark = pytest.mark.skipif(not works(), reason="this processor lacks what compiled products need")
ROUNDED_TWICE, ROUNDED_ONCE = 0.03, 0.001
"""Error bounds, as parts of a weight's norm: with rounding to four bits, and without (float16, int8 rows)."""
WIDE = {"hidden_size": 256, "intermediate_size": 256}

FILES: dict[str, Callable[[Path], Path]] = {
    "Q4_0": lambda folder: make_gguf(folder, kind=Kind.Q4_0, **WIDE),
    "Q4_1": lambda folder: make_gguf(folder, kind=Kind.Q4_1, **WIDE),
    "Q4_K": lambda folder: make_gguf(folder, kind=Kind.Q4_K, **WIDE),
    "gptq": by_gptq,
    "awq": by_awq,
    "groups": lambda folder: compressed(
        folder, "pack-quantized", num_bits=4, type="int", strategy="group", group_size=64, symmetric=True
    ),
    "outputs": lambda folder: compressed(
        folder, "pack-quantized", num_bits=4, type="int", strategy="channel", symmetric=False
    ),
}


def product_of(packed: nn.Module, inputs: int) -> Tensor:
    """The weight [out, in] that a packed layer computes with: rows with one 1 are not rounded."""
    assert isinstance(packed, Int4Linear)
    return packed(torch.eye(inputs)).t()


def error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).detach().norm() / expected.detach().norm())


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("plain", [False, True])
def test_a_stage_computes_with_the_numbers_of_the_file(tmp_path: Path, file: str, plain: bool) -> None:
    path = str(FILES[file](tmp_path))
    layer = load_stage(
        path, 0, LAYERS, capacity=8, quantization="int4", numerics=REFERENCE if plain else AUTO
    )._base.layers[0]
    own = load_whole(open_checkpoint(path), "float32").model.layers[0]
    attention, mlp = own.self_attn, own.mlp
    if plain:
        pairs = [(layer.self_attn.q_proj, [attention.q_proj]), (layer.mlp.down_proj, [mlp.down_proj])]
    else:
        pairs = [
            (layer.qkv, [attention.q_proj, attention.k_proj, attention.v_proj]),
            (layer.o_proj, [attention.o_proj]),
            (layer.gate_up, [mlp.gate_proj, mlp.up_proj]),
            (layer.down_proj, [mlp.down_proj]),
        ]
    for packed, parts in pairs:
        weight = torch.cat([part.weight for part in parts])
        assert error(product_of(packed, weight.shape[1]), weight) < ROUNDED_ONCE


def test_floats_lose_more() -> None:
    linear = linear_of(64, 32)
    assert error(product_of(Int4Linear(linear), 64), linear.weight) > ROUNDED_TWICE


def a_weight(group: int, bits: int = 4, rows: int = 16) -> GroupedWeight:
    """Return a weight that uses few of the possible values, so that rounding it again would give others."""
    torch.manual_seed(group)
    values = torch.randint(3, 2**bits - 2, (rows, 256), dtype=torch.uint8)
    scales = torch.rand(rows, 256 // group) + 0.5
    return GroupedWeight(values, scales, None, bits, group, zeros=torch.full_like(scales, 2 ** (bits - 1)))


def holding(weight: GroupedWeight) -> nn.Linear:
    linear = linear_of(256, len(weight.values))
    linear.weight.copy_(weight.dequantize())
    read_later(linear, "a weight", stored(weight), "a file")
    return linear


def test_joined_layers_keep_what_each_of_them_is_stored_as() -> None:
    """In the smallest of their groups; what is not stored in four bits is rounded to them."""
    stored, floats = [holding(a_weight(group)) for group in (128, 32)], linear_of(256, 32)
    six = holding(a_weight(64, bits=6))
    whole = joined(SideBySide([*stored, floats, six]))
    assert isinstance(whole, nn.Linear)
    assert [rows.outputs for rows in stored_rows(whole)] == [16, 16, 32, 16]
    packed = in_four_bits(whole)
    assert (packed.group, packed.values.shape) == (32, (80, 256))
    found = packed.dequantize()
    torch.testing.assert_close(found[:32], whole.weight[:32])
    assert error(found[32:64], whole.weight[32:64]) > ROUNDED_TWICE
    assert error(found[64:], whole.weight[64:]) > ROUNDED_TWICE


@pytest.mark.parametrize(("group", "kept"), [(32, 32), (128, 128), (256, 256), (16, None), (8, None)])
def test_groups_that_the_kernel_takes(group: int, kept: int | None) -> None:
    weight = a_weight(group)
    found = from_zero(weight)
    assert (None if found is None else found.group) == kept
    if found is not None:
        torch.testing.assert_close(found.dequantize(), weight.dequantize())


@pytest.mark.parametrize("group", [64, 128, 256])
@pytest.mark.parametrize("beside", [1, 3, 6, 20, 70])
def test_a_rows_bits_are_its_own_in_larger_groups(group: int, beside: int) -> None:
    packed = Int4Linear(holding(a_weight(group)))
    rows = torch.randn(beside + 1, 256, generator=torch.Generator().manual_seed(beside))
    for place in (0, beside // 2, beside):
        assert torch.equal(packed(rows)[place], packed(rows[place : place + 1])[0])


def test_a_scale_for_a_long_row_is_repeated() -> None:
    values = torch.randint(-8, 8, (4, 576), dtype=torch.int8)
    weight = GroupedWeight(values, torch.rand(4, 1) + 0.5, None, 4, 576)
    found = from_zero(weight)
    assert found is not None
    assert (found.group, found.scales.shape) == (64, (4, 9))
    torch.testing.assert_close(found.dequantize(), weight.dequantize())


def test_more_bits_than_four_are_none() -> None:
    assert from_zero(a_weight(32, bits=5)) is None
