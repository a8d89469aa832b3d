"""Linear layers of int8: close to what the floats compute, and a row's bits are its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from penstock.checkpoint.checkpoint import open_checkpoint
from penstock.checkpoint.tensors import GroupedWeight
from penstock.files import REFERENCE
from penstock.models.linear import Int8Linear, in_eight_bits, read_later, rounded, signed, works
from penstock.models.loader import load_whole
from penstock.models.stage_model import load_stage
from tests.checkpoints import LAYERS
from tests.gguf_files import make_gguf
from tests.linears import as_multiplied, linear_of, stored

pytestmark = pytest.mark.skipif(not works(), reason="this processor lacks what compiled products need")
WIDTHS = [(64, 96), (576, 192), (1536, 576), (40, 7)]
"""Widths of a layer: (input, output)."""


@pytest.mark.parametrize(("reads", "gives"), WIDTHS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_computes_what_its_rounded_weights_do(reads: int, gives: int, bias: bool, dtype: torch.dtype) -> None:
    linear = linear_of(reads, gives, bias).to(dtype)
    weight = rounded(linear.weight).dequantize()[:, :reads]
    step = linear.weight.abs().max().item() / 127
    torch.testing.assert_close(weight, linear.weight.float(), rtol=0, atol=0.51 * step)
    hidden = torch.randn(1, 5, reads).to(dtype)
    hidden[0, 1] *= 100
    bias_O = None if linear.bias is None else linear.bias.double()
    expected = nn.functional.linear(as_multiplied(hidden), weight.double(), bias_O)
    found = Int8Linear(linear)(hidden)
    assert found.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 8e-3
    assert ((found - expected).norm(dim=-1) <= tolerance * expected.norm(dim=-1)).all()


@settings(max_examples=60, deadline=None)
@given(
    shape=st.sampled_from(WIDTHS),
    seed=st.integers(0, 2**31),
    beside=st.integers(0, 70),
    place=st.integers(0, 70),
    loud=st.sampled_from([1e-6, 1.0, 1e6]),
)
def test_a_rows_bits_do_not_depend_on_the_rows_beside_it(
    shape: tuple[int, int], seed: int, beside: int, place: int, loud: float
) -> None:
    packed = Int8Linear(linear_of(*shape, bias=True))
    generator = torch.Generator().manual_seed(seed)
    row = torch.randn(1, shape[0], generator=generator)
    others = torch.randn(beside, shape[0], generator=generator) * loud
    place = min(place, beside)
    together = torch.cat([others[:place], row, others[place:]])
    assert torch.equal(packed(together)[place], packed(row)[0])


def test_an_output_of_zero_weights_is_zero() -> None:
    linear = linear_of(64, 8)
    linear.weight[3] = 0
    found = Int8Linear(linear)(torch.randn(2, 64))
    assert (found[:, 3] == 0).all()
    assert (found[:, 2] != 0).all()


def test_the_weights_are_bytes_and_groups_two() -> None:
    assert Int8Linear(linear_of(576, 192)).weight_bytes == 576 * 192 + 2 * 576 * 192 // 32


def test_single_rows_are_read_out() -> None:
    linear = linear_of(40, 50)
    packed, ids = Int8Linear(linear), torch.tensor([[3, 49], [17, 3]])
    assert torch.equal(packed.rows(ids), rounded(linear.weight).dequantize()[ids, :40])
    found = packed(torch.eye(40)).t()
    torch.testing.assert_close(packed.rows(torch.arange(50)), found, rtol=1e-6, atol=0)


def test_a_stage_computes_with_the_numbers_of_the_file(tmp_path: Path) -> None:
    """The file is Q8_0: its own values and scales are used, not rounded again."""
    path = str(make_gguf(tmp_path, kind=Kind.Q8_0, hidden_size=256, intermediate_size=256))
    layer = load_stage(path, 0, LAYERS, capacity=8, quantization="int8", numerics=REFERENCE)._base.layers[0]
    own = load_whole(open_checkpoint(path), "float32").model.layers[0]
    for packed, linear in ((layer.self_attn.q_proj, own.self_attn.q_proj), (layer.mlp.down_proj, own.mlp.down_proj)):
        assert torch.equal(packed.rows(torch.arange(len(linear.weight))), linear.weight)


def test_values_without_a_magnitude_of_their_own_are_rounded() -> None:
    """Among signed bytes -128 has no positive counterpart."""
    values = torch.full((16, 32), -128, dtype=torch.int8)
    weight = GroupedWeight(values, torch.ones(16, 1), None, 8, 32)
    linear = linear_of(32, 16)
    linear.weight.copy_(weight.dequantize())
    read_later(linear, "a weight", stored(weight), "a file")
    found = in_eight_bits(linear)
    assert int(found.values.min()) == -127
    torch.testing.assert_close(found.dequantize(), weight.dequantize(), rtol=1e-3, atol=0)


@given(st.integers(0, 2**32 - 1), st.lists(st.booleans(), min_size=32, max_size=32), st.sampled_from([32, 64, 128]))
def test_an_output_is_packed_alike_whatever_is_packed_beside_it(seed: int, lowest: list[bool], group: int) -> None:
    """Ranks each pack only the outputs that they compute."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-127, 128, (32, 128), generator=generator, dtype=torch.int8)
    values[torch.tensor(lowest), 5] = -128
    weight = GroupedWeight(values, torch.rand(32, 128 // group, generator=generator).half().float(), None, 8, group)
    whole = signed(weight)
    assert whole is not None
    for rows in (slice(0, 16), slice(16, 32)):
        part = signed(weight.rows(rows))
        assert part is not None
        assert part.group == whole.group
        assert torch.equal(part.values, whole.values[rows])
        assert torch.equal(part.scales, whole.scales[rows])
    kept = ~torch.tensor(lowest)
    assert torch.equal(whole.dequantize()[kept], weight.dequantize()[kept])
