"""Tensors as they are stored in a GGUF file: floats, or blocks of whole numbers with their own scales.

A block has 32 consecutive numbers with one scale (in _1 formats also a minimum), or 256 with a scale for every 16 or 32
of them, which is itself a whole number (_K formats). Layouts: ggml's ggml-common.h. Shapes in comments: B blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize
from torch import Tensor

from penstock.checkpoint.gguf_header import TensorInfo
from penstock.checkpoint.tensors import GroupedWeight
from penstock.core import ConfigError

FLOATS: Final = {Kind.F32: torch.float32, Kind.F16: torch.float16, Kind.BF16: torch.bfloat16}
"""Kinds of tensors that are stored as floats -> torch's format for them."""
SUPER_BLOCK: Final = 256
"""Values in a block of the K formats, ggml's ``QK_K``."""
CHUNK: Final = 1 << 22
"""Numbers that are unpacked at a time where a whole tensor becomes floats: 2^22, 16 MiB in float32. Larger pieces take
more memory, smaller ones more calls."""


class Blocks(NamedTuple):
    """Unpacked blocks: ``values`` [B, n] of ``bits`` bits, ``scales`` and ``minimums`` [B, n / group], float32."""

    values: Tensor
    scales: Tensor
    minimums: Tensor | None
    bits: int


def mapped(info: TensorInfo) -> Tensor:
    """The bytes of a tensor [rows, bytes of a row], as pages of the file that are read when they are touched."""
    rows = info.nbytes // row_bytes(info)
    try:
        # Copy-on-write, because torch knows no read-only memory. Nobody writes into it.
        data = np.memmap(info.file, mode="c", offset=info.start, shape=(rows, row_bytes(info)), dtype=np.uint8)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model: {info.file}: {info.name} cannot be read: {error}") from error
    return torch.from_numpy(np.asarray(data))


def row_bytes(info: TensorInfo) -> int:
    """Bytes of a row, which is a whole number of blocks."""
    per_block, block_bytes = GGML_QUANT_SIZES[info.kind]
    return info.shape[-1] // per_block * block_bytes


def floats(info: TensorInfo) -> Tensor:
    """A tensor as floats: in the file's format, or float32 if it is stored in blocks."""
    raw = mapped(info)
    if info.kind in FLOATS:
        return raw.view(FLOATS[info.kind]).reshape(info.shape).clone()
    found = torch.empty(len(raw), info.shape[-1])
    for rows in chunks(len(raw), info.shape[-1]):
        # Chunk by chunk: unpacking takes several floats for each number.
        found[rows] = unpack(raw[rows], info).dequantize() if info.kind in UNPACKERS else looked_up(raw[rows], info)
    return found.reshape(info.shape)


def looked_up(raw: Tensor, info: TensorInfo) -> Tensor:
    """Rows of a tensor in one of the formats of LOOKED_UP, as float32 [rows, numbers]."""
    return torch.from_numpy(dequantize(raw.numpy(), info.kind).astype(np.float32, copy=False))


def grouped(info: TensorInfo) -> GroupedWeight:
    """A tensor [out, in] that is stored in blocks, as whole numbers and scales: exactly the file's numbers."""
    parts = [unpack(rows, info) for rows in mapped(info).split(max(1, CHUNK // info.shape[-1]))]
    first = parts[0]
    minimums = [part.minimums for part in parts if part.minimums is not None]
    return GroupedWeight(
        torch.cat([part.values for part in parts]),
        torch.cat([part.scales for part in parts]),
        torch.cat(minimums) if minimums else None,
        first.bits,
        first.group,
    )


def chunks(rows: int, width: int) -> Iterator[slice]:
    """Slices of ``rows`` rows of ``width`` numbers, of at most ``CHUNK`` numbers (or one row) each."""
    step = max(1, CHUNK // width)
    return (slice(start, start + step) for start in range(0, rows, step))


def unpack(raw: Tensor, info: TensorInfo) -> GroupedWeight:
    """Some rows [rows, bytes of a row] of a tensor that is stored in blocks."""
    per_block, block_bytes = GGML_QUANT_SIZES[info.kind]
    found = UNPACKERS[info.kind](raw.reshape(-1, block_bytes))
    group = per_block // found.scales.shape[-1]
    minimums = None if found.minimums is None else found.minimums.reshape(len(raw), -1)
    return GroupedWeight(
        found.values.reshape(len(raw), -1), found.scales.reshape(len(raw), -1), minimums, found.bits, group
    )


# ------------------------------------------------------------------------------------------------- formats of 32


def q4_0(blocks: Tensor) -> Blocks:
    """float16 scale | 16 bytes: numbers 0 to 15 in the lower halves, 16 to 31 in the upper, each raised by 8."""
    return Blocks(signed(nibbles(blocks[:, 2:18]), 8), half(blocks, 0), None, 4)


def q4_1(blocks: Tensor) -> Blocks:
    """float16 scale | float16 minimum | 16 bytes of halves, as in Q4_0."""
    return Blocks(nibbles(blocks[:, 4:20]), half(blocks, 0), half(blocks, 2), 4)


def q5_0(blocks: Tensor) -> Blocks:
    """float16 scale | 4 bytes of fifth bits | 16 bytes of halves; values are raised by 16."""
    return Blocks(signed(nibbles(blocks[:, 6:22]) | fifth_bits(blocks[:, 2:6]), 16), half(blocks, 0), None, 5)


def q5_1(blocks: Tensor) -> Blocks:
    """float16 scale | float16 minimum | 4 bytes of fifth bits | 16 bytes of halves."""
    values = nibbles(blocks[:, 8:24]) | fifth_bits(blocks[:, 4:8])
    return Blocks(values, half(blocks, 0), half(blocks, 2), 5)


def q8_0(blocks: Tensor) -> Blocks:
    """float16 scale | 32 int8."""
    return Blocks(blocks[:, 2:34].view(torch.int8), half(blocks, 0), None, 8)


# ------------------------------------------------------------------------------------------------- formats of 256


def q4_k(blocks: Tensor) -> Blocks:
    """float16 of scales | float16 of minimums | 12 bytes of both (``k_scales``) | 128 bytes of halves."""
    scales, minimums = k_scales(blocks)
    return Blocks(halves_of_32(blocks[:, 16:144]), scales, minimums, 4)


def q5_k(blocks: Tensor) -> Blocks:
    """float16 of scales | float16 of minimums | 12 bytes of both (``k_scales``) | 32 bytes of fifth bits | halves."""
    scales, minimums = k_scales(blocks)
    # Bit i of byte j belongs to number 32 i + j.
    high = fields(blocks[:, 16:48], (0, 1, 2, 3, 4, 5, 6, 7), 1).reshape(-1, SUPER_BLOCK)
    return Blocks(halves_of_32(blocks[:, 48:176]) | high << 4, scales, minimums, 5)


def q6_k(blocks: Tensor) -> Blocks:
    """128 bytes of lower four bits | 64 bytes of upper two | 16 int8 scales | float16 of scales; raised by 32."""
    # Both halves of a block are stored alike: 64 bytes of lower bits for 128 numbers, 32 bytes of upper bits for them.
    low = fields(blocks[:, :128].reshape(-1, 2, 64), (0, 4), 15)  # [B, 2, 2, 64]
    high = fields(blocks[:, 128:192].reshape(-1, 2, 32), (0, 2, 4, 6), 3)  # [B, 2, 4, 32]
    values = low.reshape(-1, SUPER_BLOCK) | high.reshape(-1, SUPER_BLOCK) << 4
    scales = half(blocks, 208) * blocks[:, 192:208].view(torch.int8).float()
    return Blocks(signed(values, 32), scales, None, 6)


def k_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and minimums of eight groups of 32: six bits each in twelve bytes, times two floats of the block.

    ```
    bytes 0-3   low six bits: scales 0-3;    high two: of scales 4-7
    bytes 4-7   low six bits: minimums 0-3;  high two: of minimums 4-7
    bytes 8-11  low four bits: scales 4-7;   high four: minimums 4-7
    ```
    """
    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat([first & 63, third & 15 | first >> 6 << 4], dim=1)
    minimums = torch.cat([second & 63, third >> 4 | second >> 6 << 4], dim=1)
    # GGML subtracts minimums; ``GroupedWeight`` adds them.
    return half(blocks, 0) * scales.float(), -(half(blocks, 2) * minimums.float())


# ------------------------------------------------------------------------------------------------------------ bits


def half(blocks: Tensor, start: int) -> Tensor:
    """The float16 at offset ``start`` of every block, as float32 [B, 1]."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


def fields(data: Tensor, shifts: tuple[int, ...], mask: int) -> Tensor:
    """The bit fields of every byte: [.., n] -> [.., shifts, n]."""
    return data.unsqueeze(-2) >> torch.tensor(shifts, dtype=torch.uint8).unsqueeze(-1) & mask


def nibbles(data: Tensor) -> Tensor:
    """[B, 16] -> [B, 32]: the low halves of all bytes, then the high ones."""
    return fields(data, (0, 4), 15).reshape(-1, 32)


def halves_of_32(data: Tensor) -> Tensor:
    """[B, 128] -> [B, 256]: for each 32 bytes the low halves, then the high ones."""
    return fields(data.reshape(-1, 4, 32), (0, 4), 15).reshape(-1, SUPER_BLOCK)


def fifth_bits(data: Tensor) -> Tensor:
    """[B, 4] -> [B, 32]: bit i is the fifth bit of number i, shifted to its place."""
    return fields(data.unsqueeze(-1), (0, 1, 2, 3, 4, 5, 6, 7), 1).reshape(-1, 32) << 4


def signed(values: Tensor, offset: int) -> Tensor:
    """Values of uint8 that were raised by ``offset``, as int8."""
    return values.view(torch.int8) - offset


UNPACKERS: Final[dict[Kind, Callable[[Tensor], Blocks]]] = {
    Kind.Q4_0: q4_0,
    Kind.Q4_1: q4_1,
    Kind.Q5_0: q5_0,
    Kind.Q5_1: q5_1,
    Kind.Q8_0: q8_0,
    Kind.Q4_K: q4_k,
    Kind.Q5_K: q5_k,
    Kind.Q6_K: q6_k,
}
"""Formats that are whole numbers with scales for groups of 32 or 16 -> what unpacks their blocks [B, bytes]."""
LOOKED_UP: Final = (
    *(Kind.Q2_K, Kind.Q3_K, Kind.TQ1_0, Kind.TQ2_0, Kind.MXFP4, Kind.NVFP4, Kind.IQ4_NL, Kind.IQ4_XS),
    *(Kind.IQ3_S, Kind.IQ3_XXS, Kind.IQ2_S, Kind.IQ2_XS, Kind.IQ2_XXS, Kind.IQ1_M, Kind.IQ1_S),
)
"""Formats that the ``gguf`` package converts to floats: scales for 16 numbers, tables of numbers, ternary numbers."""
READABLE: Final = (*FLOATS, *UNPACKERS, *LOOKED_UP)
"""All formats that can be read."""
OF_FOUR_BITS: Final = (Kind.Q4_0, Kind.Q4_1, Kind.Q4_K)
"""Formats whose values have four bits, by which ``--quantization auto`` goes."""
