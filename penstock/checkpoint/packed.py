"""Weights that other tools packed (AWQ, GPTQ, bitsandbytes, compressed-tensors), unpacked as they are read."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from penstock.checkpoint.tensors import (
    GroupedWeight,
    Shards,
    StoredTensor,
    Weights,
    bits_of,
    shards_of_stages,
    stored_in,
)
from penstock.core import ConfigError
from penstock.files import problem_in, shown, torch_dtype

# ---------------------------------------------------------------------------------------------------------------- parts
# The tensors that make up one packed weight, and the properties of it that a method knows before they are read.

WORD: Final = 32
"""Bits of the whole numbers that values are packed into."""


Parts = Mapping[str, StoredTensor]
"""Name of a part, the end of its tensor's name (``qweight`` in ``model.layers.0.mlp.up_proj.qweight``) -> the part."""


class Outline(NamedTuple):
    """The properties of a weight that its parts' headers tell before they are read."""

    shape: tuple[int, int]
    """The shape [out, in]."""
    bits: int
    """Bits of a value; 8 if values of fewer bits stand for unevenly spaced numbers."""
    is_grouped: bool
    """Whether the weight is integers with scales for groups of neighbours."""


class Method(NamedTuple):
    """How one tool stores a weight [out, in]."""

    parts: frozenset[str]
    """Names of parts that may be stored in place of ``weight``."""
    needed: frozenset[str]
    """Parts that a layer must have if it has any of ``marks``."""
    marks: frozenset[str]
    """Parts that only packed weights have."""
    outline: Callable[[Parts], Outline]
    """The properties of a weight. Raises ConfigError if its parts contradict each other."""
    unpack: Callable[[Parts], GroupedWeight | Tensor]
    """The weight of outlined parts: whole numbers with scales, or floats where it is not grouped."""


FIELD: Final = "quantization_config"
"""The table of config.json in which a tool says how it has packed the weights."""
REMEDY: Final = "use a GGUF file, or the float checkpoint with --quantization int8 or int4"

Reader = Callable[[Mapping[str, Any], Path], Method]
"""Gives a tool's method by the contents of ``FIELD`` and the file that holds it. Raises ConfigError, as ``refusal``
makes it, for a layout that cannot be read."""


def refusal(file: Path, field: str, found: object, readable: tuple[str, ...]) -> ConfigError:
    """The error for a ``field`` of the table ``FIELD`` that is ``found`` with a value other than the ``readable``."""
    known = ", ".join(readable)
    return problem_in(file, f"{FIELD}.{field}", f"is {shown(found)}; {known} can be read: else {REMEDY}")


def check(part: StoredTensor, dtypes: tuple[str, ...], shape: tuple[int, ...] | None = None, rank: int = 2) -> None:
    """Raise ConfigError unless a part has one of these types and this shape, or, without a shape, ``rank`` axes.

    An axis of length 0 is refused, too.
    """
    if part.dtype not in dtypes:
        raise part.wrong(f"is stored as {part.dtype}; it has to be {' or '.join(dtypes)}")
    if shape is not None and part.shape != shape:
        raise part.wrong(f"has the shape {part.shape}; by the other parts of this weight it has to be {shape}")
    if shape is None and (len(part.shape) != rank or 0 in part.shape):
        raise part.wrong(f"has the shape {part.shape}; it has to have {rank} axes, none of them empty")


def fields(words: Tensor, bits: int) -> Tensor:
    """Unpack values of ``bits`` bits, the lowest first: int32 [rows, words] -> uint8 [rows, words * 32 / bits]."""
    shifts = torch.arange(0, WORD, bits, dtype=torch.int32)
    # The mask takes off what the shift of a negative word has filled in, too.
    return (words.unsqueeze(-1) >> shifts & (1 << bits) - 1).to(torch.uint8).flatten(-2)


# ------------------------------------------------------------------------------------------------------------------ awq
# AWQ's "gemm" layout: four bits, values and zeros packed along the outputs. Source: AutoAWQ's ``WQLinear_GEMM``.
#
# ```
# qweight [in, out / 8]      int32    eight outputs a word, in the order 0 2 4 6 1 3 5 7
# qzeros  [groups, out / 8]  int32    the values that stand for 0, packed likewise
# scales  [groups, out]      float16
# ```

AWQ_BITS: Final = 4
"""Bits of a value. AWQ's kernels have no other."""
PLACES: Final = [0, 4, 1, 5, 2, 6, 3, 7]
"""Output i of a word is its field ``PLACES[i]``, counted from the lowest bits. It is the order in which AutoAWQ
packs."""
NEEDED: Final = frozenset({"qweight", "qzeros", "scales"})
"""Parts of a weight in AWQ's and in GPTQ's layout."""


def awq_outline(parts: Parts) -> Outline:
    """AWQ's ``Method.outline``."""
    values, zeros, scales = parts["qweight"], parts["qzeros"], parts["scales"]
    check(values, ("I32",))
    check(scales, ("F16", "BF16", "F32"))
    # Stored as [in, out], so that the outputs, of which eight share a word, are the second axis.
    inputs, outputs = values.shape[0], values.shape[1] * WORD // AWQ_BITS
    groups = scales.shape[0]
    check(scales, (scales.dtype,), (groups, outputs))
    check(zeros, ("I32",), (groups, values.shape[1]))
    if inputs % groups:
        raise scales.wrong(f"has {groups} groups, which do not divide {inputs} inputs")
    return Outline((outputs, inputs), AWQ_BITS, True)


def unpack_awq(parts: Parts) -> GroupedWeight:
    """AWQ's ``Method.unpack``."""
    inputs, groups = parts["qweight"].shape[0], parts["scales"].shape[0]
    values, zeros = (in_order(fields(parts[name].read(), AWQ_BITS)).t() for name in ("qweight", "qzeros"))
    scales = parts["scales"].read().float().t()
    return GroupedWeight(values.contiguous(), scales, None, AWQ_BITS, inputs // groups, zeros=zeros)


def in_order(values: Tensor) -> Tensor:
    """[rows, outputs] as they lie in their words -> in the outputs' own order."""
    return values.unflatten(-1, (-1, len(PLACES)))[..., PLACES].flatten(-2)


AWQ: Final = Method(NEEDED, NEEDED, NEEDED, awq_outline, unpack_awq)


def awq(stated: Mapping[str, Any], file: Path) -> Method:
    """AWQ, whose layout is its ``version``."""
    layout = stated.get("version", "gemm")
    if not isinstance(layout, str) or layout.lower() != "gemm":
        raise refusal(file, "version", layout, ("gemm",))
    return AWQ


# ----------------------------------------------------------------------------------------------------------------- gptq
# GPTQ: values packed along the inputs, zeros along the outputs. Layout: gptqmodel's ``BaseQuantLinear.pack``.
#
# ```
# qweight [in * bits / 32, out]   int32    the first input in the lowest bits
# qzeros  [groups, out * bits / 32] int32  the value that stands for 0, less one in the first version of the format
# scales  [groups, out]           float16
# g_idx   [in]                    int32    the group of every input
# ```

GPTQ_BITS: Final = (2, 4, 8)
"""Bits of a value that can be read: those that divide a word."""


def gptq_outline(parts: Parts) -> Outline:
    """GPTQ's ``Method.outline``. Inputs whose groups are not neighbours (act-order) are unpacked to floats."""
    values, zeros, scales = parts["qweight"], parts["qzeros"], parts["scales"]
    check(values, ("I32",))
    check(scales, ("F16", "BF16", "F32"))
    groups, outputs = scales.shape
    check(zeros, ("I32",))
    # Zeros have one field for each output and group, which tells the bits; values then tell the inputs.
    bits = WORD * zeros.shape[1] // outputs
    if bits not in GPTQ_BITS:
        raise zeros.wrong(f"holds {bits} bits for every output; {', '.join(map(str, GPTQ_BITS))} can be read")
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


def is_in_order(index: StoredTensor, groups: int) -> bool:
    """Whether the inputs of each group are neighbours. Raises ConfigError for a group that does not exist."""
    found = index.read().long()
    if int(found.min()) < 0 or int(found.max()) >= groups:
        raise index.wrong(f"names groups from {int(found.min())} to {int(found.max())}; there are {groups}")
    return bool(torch.equal(found, torch.arange(len(found)) // (len(found) // groups)))


def unpack_gptq(parts: Parts, first_version: bool) -> GroupedWeight | torch.Tensor:
    """GPTQ's ``Method.unpack``; the ``first_version`` of the format stores zeros less one."""
    (outputs, inputs), bits, in_order = gptq_outline(parts)
    bits = WORD * parts["qzeros"].shape[1] // outputs
    words = parts["qzeros"].read()
    if first_version:
        # One is added to whole words: a zero of 0, stored as -1, has borrowed from its neighbour.
        words = words + sum(1 << shift for shift in range(0, WORD - 1, bits))
    zeros, scales = fields(words, bits), parts["scales"].read().float()
    values = fields(parts["qweight"].read().t(), bits)
    if in_order:
        return GroupedWeight(values, scales.t(), None, bits, inputs // len(scales), zeros=zeros.t())
    # Every input has the scale and the zero of the group that ``g_idx`` names for it.
    index = parts["g_idx"].read().long()
    return (values - zeros.t()[:, index].float()) * scales.t()[:, index]


GPTQ_FORMATS: Final = {
    layout: Method(NEEDED | {"g_idx"}, NEEDED, NEEDED, gptq_outline, partial(unpack_gptq, first_version=first))
    for layout, first in (("gptq", True), ("gptq_v2", False))
}


def gptq(stated: Mapping[str, Any], file: Path) -> Method:
    """GPTQ, whose layout is its ``checkpoint_format``."""
    layout = stated.get("checkpoint_format", "gptq")
    if not isinstance(layout, str) or layout not in GPTQ_FORMATS:
        raise refusal(file, "checkpoint_format", layout, tuple(GPTQ_FORMATS))
    return GPTQ_FORMATS[layout]


# --------------------------------------------------------------------------------------------------------- bitsandbytes
# bitsandbytes: bytes with a scale for every output (LLM.int8), or four bits that name one of 16 numbers (NF4, FP4).
#
# ```
# weight                     [out, in]        int8;   SCB [out] float32, the largest magnitude of every output; or
# weight                     [out * in / 2]   uint8   the first of two values in the high half
# weight.quant_map           [16]             float32 the numbers that values name
# weight.absmax              [blocks]         float32 the largest magnitude of so many neighbours, or
#                                             uint8   one of 256 numbers, nested_quant_map, times nested_absmax, plus an
#                                                     offset
# weight.quant_state...      JSON in bytes: shape, sizes of the blocks, offset, dtype
# ```
#
# Its products of 8 bits round activations, too; that is not followed. Source: bitsandbytes.functional.QuantState.

LARGEST: Final = 127
"""The int8 that stands for a row's largest absolute value."""
STATES: Final = ("weight.quant_state.bitsandbytes__nf4", "weight.quant_state.bitsandbytes__fp4")
BITSANDBYTES_PARTS: Final = frozenset(
    {"weight", "SCB", "weight_format", *STATES}
    | {f"weight.{name}" for name in ("absmax", "quant_map", "nested_absmax", "nested_quant_map")}
)
MOST_STATE: Final = 4096
"""Bytes of the longest JSON that is read beside a weight; bitsandbytes writes a few hundred."""


class State(NamedTuple):
    """The contents of the JSON beside a weight of four bits."""

    shape: tuple[int, int]
    block: int
    """Neighbours that share a scale."""
    dtype: str
    """The format that the weight had before it was packed."""
    nested_block: int
    """Scales that share a scale of their own, where scales are packed, too."""
    offset: float
    """The number that is added to each scale that was packed."""


def bitsandbytes_outline(parts: Parts) -> Outline:
    """bitsandbytes' ``Method.outline``."""
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
    """Raise ConfigError unless the scales of four-bit values are there, as many as there are blocks."""
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
    """Whether a value is a size that a tensor can have."""
    return type(value) is int and 0 < value < 1 << 31


def table_of(part: StoredTensor) -> dict[str, Any]:
    """The JSON object in the bytes of a part. Raises ConfigError if they hold anything else."""
    if part.shape[0] > MOST_STATE:
        raise part.wrong(f"has {part.shape[0]} bytes; there may be {MOST_STATE}")
    try:
        table = json.loads(part.read().numpy().tobytes())
    except (ValueError, RecursionError) as error:
        raise part.wrong(f"is not valid JSON: {error}") from error
    if not isinstance(table, dict):
        raise part.wrong("is no JSON object")
    return table


def unpack_bitsandbytes(parts: Parts) -> GroupedWeight | Tensor:
    """bitsandbytes' ``Method.unpack``."""
    if "SCB" in parts:
        values = parts["weight"].read()
        return GroupedWeight(values, parts["SCB"].read()[:, None] / LARGEST, None, 8, values.shape[1])
    state = state_of(parts)
    packed = parts["weight"].read().flatten()
    named = torch.stack([packed >> 4, packed & 15], dim=-1).flatten().int()
    # The format's sixteen numbers are not evenly spaced: values are places in a table, not whole numbers to scale.
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
    BITSANDBYTES_PARTS,
    frozenset({"weight"}),
    frozenset({"SCB", "weight.absmax", *STATES}),
    bitsandbytes_outline,
    unpack_bitsandbytes,
)


def bitsandbytes(stated: Mapping[str, Any], file: Path) -> Method:
    """bitsandbytes, whose parts say themselves which of its layouts they have."""
    return BITSANDBYTES


# --------------------------------------------------------------------------------------------------- compressed tensors
# compressed-tensors: packed words ("pack-quantized"), bytes ("int-quantized") or floats of 8 bits ("float-quantized").
#
# ```
# weight_packed      [out, in * bits / 32]       int32  the first input in the lowest bits; or else
# weight             [out, in]                   int8 or float8
# weight_scale       [1], [out, 1] or [out, groups]
# weight_zero_point  like the scales; of packed words packed along the outputs. Values and zeros share an offset
# weight_shape       [2]
# weight_g_idx       [in]                        the group of every input
# ```
#
# What it says of activations is not followed: they are not rounded. Source: compressed_tensors.compressors.

COMPRESSED_FORMATS: Final = ("pack-quantized", "int-quantized", "naive-quantized", "float-quantized")
UNFOLLOWED: Final = ("kv_cache_scheme", "transform_config")
"""Fields of compressed-tensors that change the numbers and are not supported."""
COMPRESSED_BITS: Final = (4, 8)
"""Bits of packed values that can be read. compressed-tensors' schemes W4A16 and W8A16 have them."""
FLOAT8: Final = "F8_E4M3"
COMPRESSED_PARTS: Final = frozenset(
    {"weight", "weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx"}
    | {"input_scale", "input_zero_point", "output_scale", "output_zero_point"}
)


def compressed_outline(parts: Parts) -> Outline:
    """compressed-tensors' ``Method.outline``."""
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
    """Whether the weight is whole numbers, and not floats of 8 bits."""
    return "weight_packed" in parts or parts["weight"].dtype != FLOAT8


def packed_shape(parts: Parts) -> tuple[tuple[int, int], int]:
    """The shape [out, in] of a weight in words, and the bits of a value."""
    packed, stated = parts["weight_packed"], stated_shape(parts)
    check(packed, ("I32",))
    outputs, inputs = packed.shape[0], stated[1]
    bits = WORD * packed.shape[1] // max(1, inputs)
    if stated[0] != outputs or bits not in COMPRESSED_BITS or inputs * bits != WORD * packed.shape[1]:
        raise packed.wrong(
            f"has the shape {packed.shape}, and weight_shape says {stated}: there have to be "
            f"{' or '.join(map(str, COMPRESSED_BITS))} bits for every input, and no rest of a word"
        )
    return (outputs, inputs), bits


def stated_shape(parts: Parts) -> tuple[int, int]:
    """The shape [out, in] that the part ``weight_shape`` states."""
    if "weight_shape" not in parts:
        raise parts["weight_packed"].wrong("has no weight_shape beside it: save the checkpoint again")
    part = parts["weight_shape"]
    check(part, ("I64", "I32"), (2,))
    outputs, inputs = part.read().tolist()
    return outputs, inputs


def plain_shape(parts: Parts) -> tuple[tuple[int, int], int]:
    """The shape [out, in] of a weight in bytes, and 8, the bits of a value."""
    if "weight" not in parts:
        raise parts["weight_scale"].wrong("belongs to no weight: save the checkpoint again")
    part = parts["weight"]
    check(part, ("I8", FLOAT8))
    outputs, inputs = part.shape
    return (outputs, inputs), 8


def unpack_compressed(parts: Parts) -> GroupedWeight | Tensor:
    """compressed-tensors' ``Method.unpack``."""
    (outputs, inputs), bits, grouped = compressed_outline(parts)
    scales = parts["weight_scale"].read().float()
    # A scale for the whole weight becomes one for each output.
    scales = scales.expand(outputs, 1) if scales.numel() == 1 else scales
    if not grouped:
        return parts["weight"].read().float().unflatten(-1, (scales.shape[1], -1)).mul_(scales[..., None]).flatten(-2)
    packed = "weight_packed" in parts
    values = fields(parts["weight_packed"].read(), bits) if packed else parts["weight"].read()
    zeros = parts["weight_zero_point"].read() if "weight_zero_point" in parts else None
    if packed and zeros is not None:
        # Zeros are packed along the outputs: transposed, they unpack like values.
        zeros = fields(zeros.t().contiguous(), bits).t()
    elif packed:
        # Packed values are raised by half of their range to be above 0; without stated zeros that half stands for 0.
        zeros = scales.new_full(scales.shape, 2 ** (bits - 1))
    elif zeros is not None:
        zeros = zeros.expand(scales.shape)
    return GroupedWeight(values, scales, None, bits, inputs // scales.shape[1], zeros=zeros)


COMPRESSED: Final = Method(
    COMPRESSED_PARTS,
    frozenset({"weight_scale"}),
    frozenset({"weight_packed", "weight_scale"}),
    compressed_outline,
    unpack_compressed,
)


def compressed_tensors(stated: Mapping[str, Any], file: Path) -> Method:
    """compressed-tensors, whose layout is stated for every group of layers, or for all of them."""
    groups = stated.get("config_groups")
    if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()):
        raise problem_in(file, f"{FIELD}.config_groups", f"is {shown(groups)}; it has to be a table of tables")
    for group in groups.values():
        layout = group.get("format") or stated.get("format")
        if layout not in COMPRESSED_FORMATS:
            raise refusal(file, "format", layout, COMPRESSED_FORMATS)
    for name in UNFOLLOWED:
        if stated.get(name):
            raise problem_in(file, f"{FIELD}.{name}", f"is {shown(stated[name])}, which nothing here does; {REMEDY}")
    sparsity = stated.get("sparsity_config") or {}
    if not isinstance(sparsity, dict) or sparsity.get("format", "dense") != "dense":
        raise refusal(file, "sparsity_config", sparsity, ("dense",))
    return COMPRESSED


# -------------------------------------------------------------------------------------------------------------- methods
# The tool that packed a checkpoint's weights, by its configuration. Unsupported ones are refused by name.

METHODS: Final[Mapping[str, Reader]] = {
    "compressed-tensors": compressed_tensors,
    "gptq": gptq,
    "awq": awq,
    "bitsandbytes": bitsandbytes,
}
"""Every method that can be read, by its name in ``quant_method``. A new one is a ``Reader`` and a line here."""


def method_of(table: Mapping[str, Any], file: Path) -> Method | None:
    """The method that packed a checkpoint's weights, by the ``table`` that is its config.json; None for plain floats.

    Raises ConfigError, with the name and what to do, for an unsupported method or layout. ``file`` is the
    configuration's, for that error.
    """
    stated = table.get(FIELD)
    if stated is None:
        return None
    if not isinstance(stated, dict):
        raise problem_in(file, FIELD, f"is {shown(stated)}; it has to be a table")
    name = stated.get("quant_method")
    if not isinstance(name, str) or name not in METHODS:
        raise refusal(file, "quant_method", name, tuple(METHODS))
    return METHODS[name](stated, file)


# -------------------------------------------------------------------------------------------------------------- weights
# The weights of a folder in which some are packed, under the names that they have as floats.


def packed_tensor(name: str, parts: Parts, method: Method) -> StoredTensor:
    """The weight [out, in] that ``parts`` are unpacked to. Raises ConfigError where they contradict each other."""
    outline = method.outline(parts)

    def grouped() -> GroupedWeight:
        found = method.unpack(parts)
        assert isinstance(found, GroupedWeight)
        return found

    def select(index: Any) -> Tensor:
        found = method.unpack(parts)
        return (found.dequantize() if isinstance(found, GroupedWeight) else found)[index]

    file = next(iter(parts.values())).file
    as_grouped = grouped if outline.is_grouped else None
    return StoredTensor(file, name, outline.shape, "F32", select, as_grouped, outline.bits)


class PackedShards(Weights):
    """The weights of a checkpoint of which ``method`` has packed some."""

    def __init__(self, folder: Path, method: Method) -> None:
        """Raises ConfigError if the folder has no weights, or parts of one are missing or contradict each other."""
        self._plain = Shards(folder)
        found = parts_of(shards_of_stages(folder))
        self._packed = {}
        taken: set[str] = set()
        for layer, parts in packed_layers(found, method).items():
            check_whole(layer, parts, method)
            name = f"{layer}.weight"
            self._packed[name] = packed_tensor(name, parts, method)
            taken.update(part.name for part in parts.values())
        self._others = [name for name in found if name not in taken]

    @property
    def bits(self) -> int | None:
        return bits_of(self._packed.values())

    @property
    def files(self) -> list[Path]:
        return self._plain.files

    def names(self) -> list[str]:
        return [*self._others, *self._packed]

    def slices(self, names: Iterable[str], files: contextlib.ExitStack) -> dict[str, StoredTensor]:
        asked = list(names)
        plain = self._plain.slices([name for name in asked if name not in self._packed], files)
        return {name: self._packed.get(name) or plain[name] for name in asked}


def parts_of(places: Mapping[str, Path]) -> dict[str, StoredTensor]:
    """Name -> tensor, from the shards' headers. Raises ConfigError for one that is not in its shard."""
    found = {}
    for file in sorted(set(places.values())):
        held = {tensor.name: tensor for tensor in stored_in(file)}
        for name in (name for name, place in places.items() if place == file):
            if name not in held:
                raise ConfigError(f"model: the index says that {file.name} holds {name!r}, but it does not")
            found[name] = held[name]
    return found


def packed_layers(found: Mapping[str, StoredTensor], method: Method) -> dict[str, dict[str, StoredTensor]]:
    """Layer -> name of a part -> part, for every layer whose weight is packed."""
    layers: dict[str, dict[str, StoredTensor]] = {}
    for name, part in found.items():
        if (kind := next((kind for kind in method.parts if name.endswith(f".{kind}")), None)) is not None:
            layers.setdefault(name.removesuffix(f".{kind}"), {})[kind] = part
    return {layer: parts for layer, parts in layers.items() if parts.keys() & method.marks}


def check_whole(layer: str, parts: Parts, method: Method) -> None:
    """Raise ConfigError, with the name, if a part of the weight is missing."""
    if missing := sorted(method.needed - parts.keys()):
        some = next(iter(parts.values()))
        raise some.wrong(f"has no {layer}.{missing[0]} beside it: download or save the checkpoint again")
