"""GPTQ: values packed along the inputs, zeros along the outputs. Layout: gptqmodel's ``BaseQuantLinear.pack``.

```
qweight [in * bits / 32, out]   int32    the first input in the lowest bits
qzeros  [groups, out * bits / 32] int32  the value that stands for 0, less one in the first version of the format
scales  [groups, out]           float16
g_idx   [in]                    int32    the group of every input
```
"""

from __future__ import annotations

from functools import partial
from typing import Final

import torch

from penstock.models.prequantized.parts import WORD, Method, Outline, Part, Parts, check, fields
from penstock.models.quantization.grouped import GroupedWeight

BITS: Final = (2, 4, 8)


def outline(parts: Parts) -> Outline:
    values, zeros, scales = parts["qweight"], parts["qzeros"], parts["scales"]
    check(values, ("I32",))
    check(scales, ("F16", "BF16", "F32"))
    groups, outputs = scales.shape
    check(zeros, ("I32",))
    bits = WORD * zeros.shape[1] // outputs
    if bits not in BITS:
        raise zeros.wrong(f"holds {bits} bits for every output; {', '.join(map(str, BITS))} can be read")
    check(zeros, ("I32",), (groups, outputs * bits // WORD))
    inputs = values.shape[0] * WORD // bits
    check(values, ("I32",), (inputs * bits // WORD, outputs))
    if inputs % groups:
        raise scales.wrong(f"has {groups} groups, which do not divide {inputs} inputs")
    in_order = True
    if index := parts.get("g_idx"):
        check(index, ("I32", "I64"), (inputs,))
        in_order = is_in_order(index, groups)
    return Outline((outputs, inputs), bits if in_order else 8, in_order)


def is_in_order(index: Part, groups: int) -> bool:
    """Whether the inputs of each group are neighbours. Raises ConfigError for a group that does not exist."""
    found = index.read().long()
    if int(found.min()) < 0 or int(found.max()) >= groups:
        raise index.wrong(f"names groups from {int(found.min())} to {int(found.max())}; there are {groups}")
    return bool(torch.equal(found, torch.arange(len(found)) // (len(found) // groups)))


def unpack(parts: Parts, first_version: bool) -> GroupedWeight | torch.Tensor:
    (outputs, inputs), bits, in_order = outline(parts)
    bits = WORD * parts["qzeros"].shape[1] // outputs
    words = parts["qzeros"].read()
    if first_version:  # over whole words: a zero of 0, stored as -1, borrows from its neighbour
        words = words + sum(1 << shift for shift in range(0, WORD - 1, bits))
    zeros, scales = fields(words, bits), parts["scales"].read().float()
    values = fields(parts["qweight"].read().t(), bits)
    if in_order:
        return GroupedWeight(values, scales.t(), None, bits, inputs // len(scales), zeros=zeros.t())
    index = parts["g_idx"].read().long()
    return (values - zeros.t()[:, index].float()) * scales.t()[:, index]


def gptq(first_version: bool) -> Method:
    needed = frozenset({"qweight", "qzeros", "scales"})
    return Method(needed | {"g_idx"}, needed, needed, outline, partial(unpack, first_version=first_version))
