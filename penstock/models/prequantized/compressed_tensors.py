"""compressed-tensors: packed words ("pack-quantized"), bytes ("int-quantized") or floats of 8 bits ("float-quantized").

```
weight_packed      [out, in * bits / 32]       int32  the first input in the lowest bits; or else
weight             [out, in]                   int8 or float8
weight_scale       [1], [out, 1] or [out, groups]
weight_zero_point  like the scales; of packed words packed along the outputs. Values and zeros share an offset
weight_shape       [2]
weight_g_idx       [in]                        the group of every input
```

What it says of activations is not followed: they are not rounded. Source: compressed_tensors.compressors.
"""

from __future__ import annotations

from typing import Final

from torch import Tensor

from penstock.models.prequantized.parts import WORD, Method, Outline, Part, Parts, check, fields
from penstock.models.quantization.grouped import GroupedWeight

BITS: Final = (4, 8)
FLOAT8: Final = "F8_E4M3"
PARTS: Final = frozenset(
    {"weight", "weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx"}
    | {"input_scale", "input_zero_point", "output_scale", "output_zero_point"}
)


def outline(parts: Parts) -> Outline:
    if "weight_g_idx" in parts:
        raise parts["weight_g_idx"].wrong("orders inputs by their activations, which cannot be read here")
    shape, bits = packed_shape(parts) if "weight_packed" in parts else plain_shape(parts)
    outputs, inputs = shape
    scale = parts["weight_scale"]
    if scale.shape not in ((1,), (1, 1)):
        check(scale, ("F16", "BF16", "F32"))
        check(scale, (scale.dtype,), (outputs, scale.shape[1]))
        if inputs % scale.shape[1]:
            raise scale.wrong(f"has {scale.shape[1]} groups, which do not divide {inputs} inputs")
    if zero := parts.get("weight_zero_point"):
        rows = outputs * bits // WORD if "weight_packed" in parts else outputs
        shape_of_zeros = (rows, scale.shape[1]) if "weight_packed" in parts else scale.shape
        check(zero, ("I32",) if "weight_packed" in parts else ("I8",), shape_of_zeros)
    return Outline(shape, bits, is_grouped(parts))


def is_grouped(parts: Parts) -> bool:
    return "weight_packed" in parts or parts["weight"].dtype != FLOAT8


def packed_shape(parts: Parts) -> tuple[tuple[int, int], int]:
    """The shape [out, in] of a weight in words, and the bits of a value."""
    packed, stated = parts["weight_packed"], stated_shape(parts)
    check(packed, ("I32",))
    outputs, inputs = packed.shape[0], stated[1]
    bits = WORD * packed.shape[1] // max(1, inputs)
    if stated[0] != outputs or bits not in BITS or inputs * bits != WORD * packed.shape[1]:
        raise packed.wrong(
            f"has the shape {packed.shape}, and weight_shape says {stated}: there have to be "
            f"{' or '.join(map(str, BITS))} bits for every input, and no rest of a word"
        )
    return (outputs, inputs), bits


def stated_shape(parts: Parts) -> tuple[int, int]:
    if "weight_shape" not in parts:
        raise parts["weight_packed"].wrong("has no weight_shape beside it: save the checkpoint again")
    part = parts["weight_shape"]
    check(part, ("I64", "I32"), (2,))
    outputs, inputs = part.read().tolist()
    return outputs, inputs


def plain_shape(parts: Parts) -> tuple[tuple[int, int], int]:
    if "weight" not in parts:
        raise parts["weight_scale"].wrong("belongs to no weight: save the checkpoint again")
    part: Part = parts["weight"]
    check(part, ("I8", FLOAT8))
    outputs, inputs = part.shape
    return (outputs, inputs), 8


def unpack(parts: Parts) -> GroupedWeight | Tensor:
    (outputs, inputs), bits, grouped = outline(parts)
    scales = parts["weight_scale"].read().float()
    scales = scales.expand(outputs, 1) if scales.numel() == 1 else scales
    if not grouped:
        return parts["weight"].read().float().unflatten(-1, (scales.shape[1], -1)).mul_(scales[..., None]).flatten(-2)
    packed = "weight_packed" in parts
    values = fields(parts["weight_packed"].read(), bits) if packed else parts["weight"].read()
    zeros = parts["weight_zero_point"].read() if "weight_zero_point" in parts else None
    if packed and zeros is not None:
        zeros = fields(zeros.t().contiguous(), bits).t()
    elif packed:
        zeros = scales.new_full(scales.shape, 2 ** (bits - 1))
    elif zeros is not None:
        zeros = zeros.expand(scales.shape)
    return GroupedWeight(values, scales, None, bits, inputs // scales.shape[1], zeros=zeros)


COMPRESSED: Final = Method(
    PARTS, frozenset({"weight_scale"}), frozenset({"weight_packed", "weight_scale"}), outline, unpack
)
