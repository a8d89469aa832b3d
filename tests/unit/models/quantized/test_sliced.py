"""Whole numbers that become floats slice by slice: the weights are those of the dequantised file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from gguf import GGMLQuantizationType as Kind
from torch import nn

from penstock.core import ConfigError
from penstock.models import linear as sliced
from penstock.models.linear import SlicedLinear, in_bytes, in_eight_bits, in_four_bits, weight_bytes
from penstock.models.packing import TableEmbedding, pack_sliced, quantize_ends
from penstock.models.stage_model import load_stage
from tests.checkpoints import LAYERS, make_checkpoint
from tests.fake_gpu import batches
from tests.gguf_files import make_gguf

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("slices", [1, 3, 48])
@pytest.mark.parametrize("bias", [True, False])
def test_the_weights_are_rounded_once(
    dtype: torch.dtype, bits: int, slices: int, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(64, 48, bias=bias, dtype=dtype)
    # Scales that float16 holds, as in files: what it cannot hold is rounded when a layer is packed.
    linear.weight.data = torch.randint(-7, 8, (48, 64)).to(dtype) / 8
    weight = in_four_bits(linear) if bits == 4 else in_eight_bits(linear)
    monkeypatch.setattr(sliced, "MOST_FLOATS", 48 * 64 // slices)
    made = SlicedLinear(linear, weight)
    halved = [None if one is None else one.half().float() for one in (weight.scales, weight.minimums)]
    floats = type(weight)(weight.values, halved[0], halved[1], weight.bits, weight.group).dequantize()  # type: ignore[arg-type]
    rows = torch.randn(2, 5, 64, dtype=dtype)
    step = 48 // slices
    expected = [
        F.linear(rows, floats[i : i + step].to(dtype), linear.bias[i : i + step] if bias else None)
        for i in range(0, 48, step)
    ]
    torch.testing.assert_close(
        made(rows), torch.cat(expected, dim=-1), rtol=1e-6 if dtype == torch.float32 else 0, atol=1e-6
    )
    assert torch.equal(made.rows(torch.tensor([[3, 40]])), floats[[3, 40]][None])


def test_inputs_that_fill_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    linear = nn.Linear(40, 8)
    made = SlicedLinear(linear, in_eight_bits(linear))
    rows = torch.randn(3, 40)
    torch.testing.assert_close(made(rows), linear(rows), atol=0.02, rtol=0.02)


def test_two_values_share_a_byte() -> None:
    values = torch.randint(0, 16, (6, 32), dtype=torch.uint8)
    packed = in_bytes(values)
    assert packed.shape == (6, 16)
    assert torch.equal(torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2), values)


@pytest.mark.parametrize(("kind", "quantization", "most"), [(Kind.Q4_1, "int4", 0.2), (Kind.Q8_0, "int8", 0.31)])
def test_a_stage_computes_with_the_files_own_numbers(
    tmp_path: Path, kind: Kind, quantization: str, most: float
) -> None:
    """Its layers give what those of the dequantised file give; only the ends are rounded again, to eight bits."""
    target = str(make_gguf(tmp_path, kind=kind))
    options = {"capacity": 128, "numerics": "fast", "max_model_len": 128}
    plain, whole = (load_stage(target, 0, 1, **options) for _ in range(2))  # type: ignore[arg-type]
    before = weight_bytes(whole._base.layers)
    pack_sliced(whole._base.layers, quantization)
    assert weight_bytes(whole._base.layers) < most * before
    for view in batches():
        torch.testing.assert_close(whole.forward(view, None), plain.forward(view, None), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tied", [True, False])
def test_ends_have_eight_bits(tied: bool) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(50, 64), nn.Linear(64, 50, bias=False)
            if tied:
                self.head.weight = self.embed.weight

        def get_output_embeddings(self) -> nn.Module:
            return self.head

        def set_output_embeddings(self, head: nn.Module) -> None:
            self.head = head  # type: ignore[assignment]

    model = Model()
    weights = [model.embed.weight.detach().clone(), model.head.weight.detach().clone()]
    quantize_ends(model, model, "embed", tied=tied, sliced=True)
    assert isinstance(model.head, SlicedLinear)
    assert isinstance(model.embed, TableEmbedding)
    assert (model.embed.table is model.head) == tied
    ids = torch.tensor([[4, 49, 0]])
    torch.testing.assert_close(model.embed(ids), weights[0][ids], atol=0.02, rtol=0)
    rows = torch.randn(2, 64)
    torch.testing.assert_close(model.head(rows), rows @ weights[1].T, atol=0.2, rtol=0)


def test_another_device_gets_whole_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes alone, on torch's meta device."""
    monkeypatch.setattr("penstock.models.stage_model.check_entry", lambda *args: None)
    target = str(make_checkpoint(tmp_path / "dense", "gemma2"))
    stage = load_stage(target, 0, LAYERS, capacity=128, device="meta", quantization="int4", dtype="bfloat16")
    kinds = {type(one) for one in stage._base.modules()}
    assert SlicedLinear in kinds
    assert nn.Linear not in kinds
    hidden = stage.forward(batches()[0], None)
    assert (hidden.dtype, hidden.device.type) == (torch.bfloat16, "meta")
    assert stage.logits(hidden, [1]).shape == (1, 160)
    with pytest.raises(ConfigError, match="int4 is for linear layers"):
        load_stage(
            str(make_checkpoint(tmp_path / "experts", "mixtral")),
            0,
            2,
            capacity=8,
            device="meta",
            quantization="int4",
            dtype="bfloat16",
        )
