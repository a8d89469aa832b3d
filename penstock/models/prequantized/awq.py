"""AWQ's "gemm" layout: four bits, values and zeros packed along the outputs. Source: AutoAWQ's ``WQLinear_GEMM``.

```
qweight [in, out / 8]      int32    eight outputs a word, in the order 0 2 4 6 1 3 5 7
qzeros  [groups, out / 8]  int32    the values that stand for 0, packed likewise
scales  [groups, out]      float16
```
"""

from __future__ import annotations

from typing import Final

from torch import Tensor

from penstock.models.prequantized.parts import WORD, Method, Outline, Parts, check, fields
from penstock.models.quantization.grouped import GroupedWeight

BITS: Final = 4
PLACES: Final = [0, 4, 1, 5, 2, 6, 3, 7]
"""The place of every output in its word."""
NEEDED: Final = frozenset({"qweight", "qzeros", "scales"})


def outline(parts: Parts) -> Outline:
    values, zeros, scales = parts["qweight"], parts["qzeros"], parts["scales"]
    check(values, ("I32",))
    check(scales, ("F16", "BF16", "F32"))
    inputs, outputs = values.shape[0], values.shape[1] * WORD // BITS
    groups = scales.shape[0]
    check(scales, (scales.dtype,), (groups, outputs))
    check(zeros, ("I32",), (groups, values.shape[1]))
    if inputs % groups:
        raise scales.wrong(f"has {groups} groups, which do not divide {inputs} inputs")
    return Outline((outputs, inputs), BITS, True)


def unpack(parts: Parts) -> GroupedWeight:
    inputs, groups = parts["qweight"].shape[0], parts["scales"].shape[0]
    values, zeros = (in_order(fields(parts[name].read(), BITS)).t() for name in ("qweight", "qzeros"))
    scales = parts["scales"].read().float().t()
    return GroupedWeight(values.contiguous(), scales, None, BITS, inputs // groups, zeros=zeros)


def in_order(values: Tensor) -> Tensor:
    """[rows, outputs] as they lie in their words -> in the outputs' own order."""
    return values.unflatten(-1, (-1, len(PLACES)))[..., PLACES].flatten(-2)


AWQ: Final = Method(NEEDED, NEEDED, NEEDED, outline, unpack)
