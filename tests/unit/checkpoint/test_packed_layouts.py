"""Packed weights are the numbers that the tool which wrote them makes of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from penstock.checkpoint.packed import AWQ, GPTQ_FORMATS, Method, fields, packed_tensor, parts_of
from penstock.checkpoint.tensors import StoredTensor
from penstock.core import ConfigError
from tests.packed_checkpoints import along_rows

WRITTEN = Path(__file__).parent / "written"
"""Layers that gptqmodel 7.7 packed, with what its own ``dequantize_weight`` makes of them in float32."""


def tensor_in(file: Path, method: Method) -> StoredTensor:
    names = [name for name in load_file(file) if name.startswith("layer.")]
    parts = parts_of(dict.fromkeys(names, file))
    return packed_tensor("layer", {name.removeprefix("layer."): part for name, part in parts.items()}, method)


@pytest.mark.parametrize(
    ("file", "method", "bits", "is_grouped"),
    [
        ("gptq", GPTQ_FORMATS["gptq"], 4, True),
        ("gptq_asymmetric", GPTQ_FORMATS["gptq"], 4, True),
        ("gptq_v2", GPTQ_FORMATS["gptq_v2"], 4, True),
        ("gptq_8_bits", GPTQ_FORMATS["gptq"], 8, True),
        ("gptq_act_order", GPTQ_FORMATS["gptq"], 8, False),
        ("awq", AWQ, 4, True),
    ],
)
def test_what_gptqmodel_wrote_is_read_as_it_reads_it(file: str, method: Method, bits: int, is_grouped: bool) -> None:
    path = WRITTEN / f"{file}.safetensors"
    tensor, expected = tensor_in(path, method), load_file(path)["weight"]
    assert tensor.get_shape() == [32, 64] == list(expected.shape)
    assert (tensor.bits, tensor.is_grouped) == (bits, is_grouped)
    assert torch.equal(tensor[...], expected)
    if is_grouped:
        assert torch.equal(tensor.grouped().dequantize(), expected)


def test_versions_of_gptq_differ() -> None:
    path = WRITTEN / "gptq_v2.safetensors"
    assert not torch.equal(tensor_in(path, GPTQ_FORMATS["gptq"])[...], load_file(path)["weight"])


def test_fields_of_words() -> None:
    values = torch.arange(32).reshape(2, 16) % 16
    assert torch.equal(fields(along_rows(values.int()), 4), values.to(torch.uint8))
    assert fields(torch.tensor([[-1, 1]], dtype=torch.int32), 8).tolist() == [[255, 255, 255, 255, 1, 0, 0, 0]]


def test_parts_that_are_not_in_their_shard_are_named() -> None:
    file = WRITTEN / "awq.safetensors"
    with pytest.raises(ConfigError, match=r"the index says that awq\.safetensors holds 'layer\.x', but it does not"):
        parts_of({"layer.x": file})
