"""Small packed checkpoints. Those of compressed-tensors and bitsandbytes are written by these libraries."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from tests.checkpoints import make_checkpoint

SIZES: Final = {"hidden_size": 64, "intermediate_size": 128}
WORD: Final = 32
AWQ_ORDER: Final = [0, 2, 4, 6, 1, 3, 5, 7]
"""The output whose value is at each place of a packed word."""

FOUR_BITS: Final = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
EIGHT_BITS: Final = {"num_bits": 8, "type": "int", "symmetric": True}
FLOATS: Final = {"num_bits": 8, "type": "float", "symmetric": True}

COMPRESSED: Final[dict[str, tuple[str, dict[str, Any], int]]] = {
    "four bits": ("pack-quantized", {**FOUR_BITS, "symmetric": True}, 4),
    "four bits, zeros": ("pack-quantized", {**FOUR_BITS, "symmetric": False}, 4),
    "four bits an output": ("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "channel"}, 4),
    "eight bits, packed": ("pack-quantized", {**EIGHT_BITS, "strategy": "channel"}, 8),
    "bytes": ("int-quantized", {**EIGHT_BITS, "strategy": "channel"}, 8),
    "bytes, one scale": ("int-quantized", {**EIGHT_BITS, "strategy": "tensor"}, 8),
    "floats of eight bits": ("float-quantized", {**FLOATS, "strategy": "channel"}, 8),
    "floats, one scale": ("float-quantized", {**FLOATS, "strategy": "tensor"}, 8),
}
"""Formats of compressed-tensors: layout, arguments of its QuantizationArgs, and bits."""


def floats(folder: Path, architecture: str = "llama", **overrides: Any) -> Path:
    return make_checkpoint(folder / "floats", architecture, tokenizer=True, **SIZES, **overrides)


def compressed(folder: Path, layout: str, architecture: str = "llama", **arguments: Any) -> Path:
    """Write a format of compressed-tensors; ``arguments`` are for its QuantizationArgs."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        apply_quantization_config,
    )

    weights = QuantizationArgs(**arguments)
    scheme = QuantizationScheme(targets=["Linear"], weights=weights, format=layout)
    config = QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"], format=layout)
    packed = folder / "packed"
    with quiet():
        model = AutoModelForCausalLM.from_pretrained(floats(folder, architecture), dtype=torch.float32)
        apply_quantization_config(model, config)
        for module in model.modules():
            if getattr(module, "quantization_scheme", None) is not None:
                calibrate(module, weights)
        compressor = ModelCompressor(quantization_config=config)
        compressor.compress_model(model)
        model.save_pretrained(packed)
        compressor.update_config(packed)
    return packed


def calibrate(module: Any, weights: Any) -> None:
    """Scales and zeros from the smallest and largest weight of every group, output or layer."""
    from compressed_tensors.quantization.utils import calculate_qparams

    groups = module.weight.data.unflatten(-1, (-1, weights.group_size or module.weight.shape[1]))
    low, high = groups.amin(-1), groups.amax(-1)
    if weights.strategy == "tensor":
        low, high = low.amin().reshape(1), high.amax().reshape(1)
    scales, zeros = calculate_qparams(low, high, weights)
    module.weight_scale.data.copy_(scales.reshape(module.weight_scale.shape))
    if hasattr(module, "weight_zero_point"):
        module.weight_zero_point.data.copy_(zeros.reshape(module.weight_zero_point.shape))


def by_bitsandbytes(folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Path:
    """Write bitsandbytes' format; ``options`` are for its BitsAndBytesConfig."""
    packed = folder / "packed"
    config = BitsAndBytesConfig(**options)
    with quiet():
        model = AutoModelForCausalLM.from_pretrained(
            floats(folder), quantization_config=config, dtype=dtype, device_map="cpu"
        )
        model.save_pretrained(packed)
    return packed


def by_gptq(folder: Path, layout: str = "gptq", *, in_order: bool = True, **overrides: Any) -> Path:
    """Write the format of gptqmodel (which needs a newer torch itself): four bits in groups of 32, with zeros."""

    def parts(weight: Tensor) -> dict[str, Tensor]:
        order = torch.arange(weight.shape[1]) if in_order else activation_order(weight.shape[1])
        values, scales, zeros = rounded(weight[:, order])
        back = order.argsort()
        return {
            "qweight": along_rows(values[:, back]).t().contiguous(),
            "qzeros": along_rows(zeros.t()) - (0x11111111 if layout == "gptq" else 0),
            "scales": scales.t().half().contiguous(),
            "g_idx": (back // 32).int(),
        }

    stated = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": not in_order}
    return repacked(floats(folder, **overrides), parts, {**stated, "checkpoint_format": layout})


def activation_order(inputs: int) -> Tensor:
    """An order of inputs, group by group, in which the inputs of a group are no neighbours."""
    return torch.arange(inputs).view(2, -1).t().flatten()


def by_awq(folder: Path) -> Path:
    """Write the format of AutoAWQ, in groups of 32."""

    def parts(weight: Tensor) -> dict[str, Tensor]:
        values, scales, zeros = rounded(weight)
        qweight, qzeros = (
            along_rows(found.t().unflatten(-1, (-1, 8))[..., AWQ_ORDER].flatten(-2)) for found in (values, zeros)
        )
        return {"qweight": qweight, "qzeros": qzeros, "scales": scales.t().half().contiguous()}

    return repacked(floats(folder), parts, {"quant_method": "awq", "bits": 4, "version": "gemm", "zero_point": True})


def rounded(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A weight in groups of 32: values [out, in] of four bits, scales and zeros [out, groups]."""
    groups = weight.unflatten(-1, (-1, 32))
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    scales = ((high - low) / 15).half().float()
    zeros = (-low / scales).round().clamp(0, 15)
    values = (groups / scales[..., None] + zeros[..., None]).round().clamp(0, 15)
    return values.flatten(-2).int(), scales, zeros.int()


def along_rows(values: Tensor) -> Tensor:
    """Values of four bits [rows, n] in words [rows, n / 8], the first in the lowest bits."""
    shifts = torch.arange(0, WORD, 4, dtype=torch.int32)
    return (values.unflatten(-1, (-1, 8)) << shifts).sum(-1, dtype=torch.int32)


def repacked(folder: Path, parts: Any, stated: dict[str, Any]) -> Path:
    """The folder with its layers' projections in ``parts``."""
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        weight = tensors.pop(name)
        tensors |= {name.removesuffix("weight") + part: found for part, found in parts(weight).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": stated}))
    return folder


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence these libraries' progress bars and messages on stderr."""
    with open("/dev/null", "w") as nowhere, contextlib.redirect_stderr(nowhere):
        yield


WRITERS: Final[dict[str, dict[str, Callable[[Path], Path]]]] = {
    "gptq": {"gptq": by_gptq, "gptq, any order": lambda folder: by_gptq(folder, in_order=False)},
    "awq": {"awq": by_awq},
    "compressed-tensors": {
        "words": lambda folder: compressed(
            folder, "pack-quantized", num_bits=4, type="int", strategy="group", group_size=32, symmetric=False
        ),
        "bytes": lambda folder: compressed(
            folder, "int-quantized", num_bits=8, type="int", strategy="channel", symmetric=True
        ),
        "floats": lambda folder: compressed(
            folder, "float-quantized", num_bits=8, type="float", strategy="tensor", symmetric=True
        ),
    },
    "bitsandbytes": {
        "four bits": lambda folder: by_bitsandbytes(folder, load_in_4bit=True, bnb_4bit_use_double_quant=True),
        "eight bits": lambda folder: by_bitsandbytes(folder, load_in_8bit=True),
    },
}
"""Each method that can be read, with what writes its forms: the tests of every format go through all of them."""
FORMS: Final = {form: write for forms in WRITERS.values() for form, write in forms.items()}
