"""bitsandbytes: bytes with a scale for every output (LLM.int8), or four bits that name one of 16 numbers (NF4, FP4).

```
weight                     [out, in]        int8;   SCB [out] float32, the largest magnitude of every output; or
weight                     [out * in / 2]   uint8   the first of two values in the high half
weight.quant_map           [16]             float32 the numbers that values name
weight.absmax              [blocks]         float32 the largest magnitude of so many neighbours, or
                                            uint8   one of 256 numbers, nested_quant_map, times nested_absmax, plus an
                                                    offset
weight.quant_state...      JSON in bytes: shape, sizes of the blocks, offset, dtype
```

Its products of 8 bits round activations, too; that is not followed. Source: bitsandbytes.functional.QuantState.
"""

from __future__ import annotations

import json
from math import prod
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from penstock.dtypes import torch_dtype
from penstock.models.prequantized.parts import Method, Outline, Part, Parts, check
from penstock.models.quantization.grouped import GroupedWeight

LARGEST: Final = 127
STATES: Final = ("weight.quant_state.bitsandbytes__nf4", "weight.quant_state.bitsandbytes__fp4")
PARTS: Final = frozenset(
    {"weight", "SCB", "weight_format", *STATES}
    | {f"weight.{name}" for name in ("absmax", "quant_map", "nested_absmax", "nested_quant_map")}
)
MOST_STATE: Final = 4096
"""The longest JSON, in bytes."""


class State(NamedTuple):
    """The contents of the JSON beside a weight of four bits."""

    shape: tuple[int, int]
    block: int
    dtype: str
    nested_block: int
    offset: float


def outline(parts: Parts) -> Outline:
    weight = parts["weight"]
    if "SCB" in parts:
        check(weight, ("I8",))
        check(parts["SCB"], ("F32",), weight.shape[:1])
        outputs, inputs = weight.shape
        return Outline((outputs, inputs), 8, True)
    state = state_of(parts)
    check(weight, ("U8",), (prod(state.shape) // 2, 1))
    check_scales(parts, state)
    return Outline(state.shape, 8, False)


def check_scales(parts: Parts, state: State) -> None:
    blocks = -(-prod(state.shape) // state.block)
    if missing := [name for name in ("weight.absmax", "weight.quant_map") if name not in parts]:
        raise parts["weight"].wrong(f"has no {missing[0]} beside it: save the checkpoint again")
    check(parts["weight.quant_map"], ("F32",), (16,))
    if "weight.nested_absmax" not in parts:
        return check(parts["weight.absmax"], ("F32",), (blocks,))
    check(parts["weight.absmax"], ("U8",), (blocks,))
    check(parts["weight.nested_absmax"], ("F32",), (-(-blocks // state.nested_block),))
    if "weight.nested_quant_map" not in parts:
        raise parts["weight"].wrong("has no weight.nested_quant_map beside it: save the checkpoint again")
    return check(parts["weight.nested_quant_map"], ("F32",), (256,))


def state_of(parts: Parts) -> State:
    """Read the state. Raises ConfigError if it is missing, or not as expected."""
    part = next((parts[name] for name in STATES if name in parts), None)
    if part is None:
        raise parts["weight"].wrong("has no quant_state beside it: save the checkpoint again")
    check(part, ("U8",), rank=1)
    table = table_of(part)
    shape = table.get("shape")
    if not (isinstance(shape, list) and len(shape) == 2 and all(is_size(size) for size in shape)) or prod(shape) % 2:
        raise part.wrong("says no shape of two sizes, of which one is even")
    sizes = [table.get("blocksize"), table.get("nested_blocksize", 1)]
    offset, dtype = table.get("nested_offset", 0.0), table.get("dtype")
    if not all(map(is_size, sizes)) or not isinstance(offset, float | int) or dtype not in DTYPES:
        raise part.wrong(f"lacks blocksize, nested_blocksize, nested_offset or a dtype of {', '.join(DTYPES)}")
    return State((shape[0], shape[1]), sizes[0], str(dtype), sizes[1], float(offset))


DTYPES: Final = ("float32", "float16", "bfloat16")


def is_size(value: Any) -> bool:
    return type(value) is int and 0 < value < 1 << 31


def table_of(part: Part) -> dict[str, Any]:
    if part.shape[0] > MOST_STATE:
        raise part.wrong(f"has {part.shape[0]} bytes; there may be {MOST_STATE}")
    try:
        table = json.loads(part.read().numpy().tobytes())
    except (ValueError, RecursionError) as error:
        raise part.wrong(f"is not valid JSON: {error}") from error
    if not isinstance(table, dict):
        raise part.wrong("is no JSON object")
    return table


def unpack(parts: Parts) -> GroupedWeight | Tensor:
    if "SCB" in parts:
        values = parts["weight"].read()
        return GroupedWeight(values, parts["SCB"].read()[:, None] / LARGEST, None, 8, values.shape[1])
    state = state_of(parts)
    packed = parts["weight"].read().flatten()
    named = torch.stack([packed >> 4, packed & 15], dim=-1).flatten().int()
    numbers = parts["weight.quant_map"].read()[named]
    blocks = absmax(parts, state).repeat_interleave(state.block)[: len(numbers)]
    # Rounded to the format that the weights had, since transformers multiplies by these numbers.
    return (numbers * blocks).to(torch_dtype(state.dtype)).float().reshape(state.shape)


def absmax(parts: Parts, state: State) -> Tensor:
    """The largest magnitude of every block, float32."""
    stored = parts["weight.absmax"].read()
    if "weight.nested_absmax" not in parts:
        return stored
    scales = parts["weight.nested_absmax"].read().repeat_interleave(state.nested_block)[: len(stored)]
    return parts["weight.nested_quant_map"].read()[stored.int()] * scales + state.offset


BITSANDBYTES: Final = Method(
    PARTS, frozenset({"weight"}), frozenset({"SCB", "weight.absmax", *STATES}), outline, unpack
)
