"""Linear layers in packed layouts (int4, int8, floats), made of the file's own numbers, and sliced ones for GPUs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Final, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.checkpoint.tensors import (
    GroupedWeight,
    StoredTensor,
    check_finite,
    in_groups,
    in_signed_groups,
    raised,
    stacked,
)
from penstock.models.compiled.dot import GROUP, LANES, instruction
from penstock.models.compiled.float_blocks import FORMS, QUAD, in_float_blocks, rows_of_blocks
from penstock.models.compiled.products import Weights, product

# --------------------------------------------------------------------------------------------------------------- packed
# The base classes of layers whose weights are in a kernel's own layout.


class Packed(nn.Module):
    """Computes the same as the layer that it was made of; drop-in for ``nn.Linear`` and ``nn.Embedding``."""

    weight_bytes: int
    """Bytes of weights that are neither in ``parameters`` nor in ``buffers``."""


class BlockLinear(Packed):
    """Replaces ``linear``, with weights in blocks of outputs that compiled loops multiply (``compiled.products``).

    Outputs and inputs are filled up with zeros as ``weights`` has them. A row's bits depend only on the row.
    """

    def __init__(self, weights: Weights, linear: nn.Linear) -> None:
        super().__init__()
        self.outputs, self.inputs = linear.weight.shape
        self.weights = weights
        self.weight_bytes = weights.values.nbytes + weights.scales.nbytes
        self.bias = linear.bias

    def forward(self, hidden: Tensor) -> Tensor:
        """[.., in] -> [.., out], in the format of ``hidden``"""
        return self.products(hidden).to(hidden.dtype)

    def products(self, hidden: Tensor) -> Tensor:
        """[.., in] -> [.., out], float32"""
        products = self.product(hidden.reshape(-1, hidden.shape[-1]).float())
        if self.bias is not None:
            products += self.bias
        return products.view(*hidden.shape[:-1], -1)

    def product(self, rows: Tensor) -> Tensor:
        """[N, in] -> [N, out], without the bias, both float32"""
        missing, computed = self.weights.inputs - self.inputs, self.weights.outputs
        # Blocks are padded with zeros to whole groups and outputs: the rows follow, and the sums stay the same.
        if missing:
            rows = nn.functional.pad(rows, (0, missing))
        found = torch.empty(len(rows), computed)
        product(rows.contiguous().numpy(), self.weights, found.numpy())
        return found if computed == self.outputs else found[:, : self.outputs].contiguous()


def weight_bytes(module: nn.Module) -> int:
    """Bytes of the weights under ``module``, packed or not, each counted once."""
    packed = sum(m.weight_bytes for m in module.modules() if isinstance(m, Packed))
    tensors = {id(t): t for t in (*module.parameters(), *module.buffers())}
    return packed + sum(int(t.numel() * t.element_size()) for t in tensors.values())


# ---------------------------------------------------------------------------------------------------------------- whole
# Linear layers of quantised weights: rows are rounded to whole numbers, too, and compiled loops multiply.
#
# A row's bits depend only on the row (``compiled.dot``).

LARGEST_GROUP: Final = 256
"""Most inputs that share a scale. Groups are powers of two, so that a loop finds a group's scales by a shift."""


class WholeLinear(BlockLinear):
    """Replaces ``linear``, with weights packed from its own and padded with zeros to whole groups and blocks."""

    def __init__(self, values: Tensor, scales: Tensor, bits: int, shift: int, linear: nn.Linear) -> None:
        outputs, inputs = linear.weight.shape
        arrays = values.numpy(), scales.view(torch.uint16).numpy()
        super().__init__(Weights(*arrays, bits, shift, raised(inputs, GROUP), raised(outputs, LANES)), linear)


def scales_in_blocks(*scales: Tensor) -> Tensor:
    """Each of ``scales`` [O, G] as float16 in the order of ``compiled.dot``: blocks, groups, ``scales``, outputs."""
    outputs, groups = scales[0].shape
    together = nn.functional.pad(torch.stack(scales).half(), (0, 0, 0, raised(outputs, LANES) - outputs))
    return together.view(len(scales), -1, LANES, groups).permute(1, 3, 0, 2).contiguous()


def shift_of(weight: GroupedWeight) -> int:
    """The logarithm to base 2 of the number of kernel groups, ``GROUP`` inputs each, that share a scale."""
    return (weight.group // GROUP).bit_length() - 1


def works() -> bool:
    """Whether this processor has the instructions for compiled products."""
    return instruction() is not None


# --------------------------------------------------------------------------------------------------------------- floats
# Float linear layers whose weights are arranged once at load: for compiled loops, or in oneDNN's own layout.
#
# Compiled loops give a row the same bits whatever is beside it (``compiled.float_blocks``); oneDNN's do not.
#
# oneDNN measured on one core with AVX512 (benchmark shapes 512 to 5632 x 2048): with 4 to 16 rows the packed product
# takes 0.3 to 0.6 of torch's time in float32 and 0.4 to 0.7 in bfloat16 (where both give the same bits); with one row
# it takes the same time in float32 from width 1024 on, and 0.4 to 0.6 in bfloat16. Below ``SMALLEST`` elements the call
# costs more than it saves.

SMALLEST: Final = 1 << 17
"""Elements of a weight from which on a packed product pays."""


class FloatLinear(BlockLinear):
    """A linear layer with weights in float32, bfloat16 or float16, as ``linear`` has them.

    Rows are rounded to the same format before they are multiplied, as they are between transformers' modules.
    """

    def __init__(self, linear: nn.Linear) -> None:
        outputs, inputs = linear.weight.shape
        self._format = linear.weight.dtype
        values = in_float_blocks(linear.weight)
        stored = values if self._format == torch.float32 else values.view(torch.uint16)
        form, scales = FORMS[self._format], np.empty(0, np.uint16)
        super().__init__(Weights(stored.numpy(), scales, form, 0, raised(inputs, QUAD), raised(outputs, LANES)), linear)
        self._blocks = values

    def rows(self, ids: Tensor) -> Tensor:
        """The weights of single outputs, float32: [..] -> [.., in]."""
        return rows_of_blocks(self._blocks, ids)[..., : self.inputs].float()


class FloatHead(FloatLinear):
    """Drop-in for the head's ``nn.Linear``; an embedding can read the same rows, so that they are held once."""

    def forward(self, hidden: Tensor) -> Tensor:
        """The logits [.., D] -> [.., V], left in float32."""
        return self.products(hidden)


class PackedLinear(Packed):
    """Computes the same as ``linear``; float32 results differ by rounding only."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight_bytes = linear.weight.numel() * linear.weight.element_size()
        self.bias = linear.bias
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach())

    def forward(self, hidden: Tensor) -> Tensor:
        """[.., in] -> [.., out]"""
        return torch.ops.mkldnn._linear_pointwise(hidden, self._packed, self.bias, "none", [], "")


class TiedHead(nn.Module):
    """A float head whose weight is also the embedding's: it stays unpacked, so that it is held once.

    Measured in float32, 49152 x 576, with 1 to 64 rows: 1.0 to 1.4 times the time of a packed head with two threads,
    1.2 to 1.8 times with one. torch's own product takes 2 to 5 times as long.
    """

    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        self.weight = head.weight
        self.bias = head.bias

    def forward(self, hidden: Tensor) -> Tensor:
        """[.., D] -> [.., V]"""
        return torch.ops.mkldnn._linear_pointwise(hidden, self.weight, self.bias, "none", [], "")


def can_pack(dtype: torch.dtype) -> bool:
    """Whether oneDNN computes packed layers of this type on this processor; bfloat16 takes AVX512."""
    if not torch.backends.mkldnn.is_available():
        return False
    supported = torch.ops.mkldnn._is_mkldnn_bf16_supported() if dtype == torch.bfloat16 else dtype == torch.float32
    return bool(supported)


def gains(linear: nn.Linear) -> bool:
    """Whether a linear layer is faster when it is packed."""
    return linear.weight.device.type == "cpu" and linear.weight.numel() >= SMALLEST and can_pack(linear.weight.dtype)


# --------------------------------------------------------------------------------------------------------------- stored
# The file's own numbers for linear layers, read as each layer is packed; whole ones are not rounded a second time.
#
# A layer's rows may come from several tensors, because layers that read the same input are joined before they are
# packed:
#
# ```
# q_proj [q, in]  k_proj [k, in]  v_proj [v, in]   ->   one layer [q + k + v, in] of three ``StoredRows``
# ```


class StoredRows(NamedTuple):
    """Consecutive outputs of a linear layer that come from one tensor, which is read when they are packed."""

    outputs: int
    name: str
    tensor: StoredTensor | None
    """The tensor in its file; None if the layer's own weight holds the numbers."""
    file: str
    first: int = 0
    """The first of the outputs, as the tensor counts them."""

    def packed(
        self,
        weight: Tensor,
        kept: Callable[[GroupedWeight], GroupedWeight | None],
        rounded: Callable[[Tensor], GroupedWeight],
    ) -> GroupedWeight:
        """The rows as whole numbers. ``weight`` [outputs, in] is the layer's, in the model's format.

        Raises ConfigError if they hold NaN or infinity.
        """
        if self.tensor is None:
            return rounded(weight)
        rows = slice(self.first, self.first + self.outputs)
        if not self.tensor.is_grouped:
            return rounded(self._checked(self.tensor[rows].to(weight.dtype)))
        whole = self.tensor.grouped().rows(rows)
        check_finite(self.file, ((self.name, floats) for floats in whole.floats))
        own = kept(whole)
        return rounded(self._checked(whole.dequantize().to(weight.dtype))) if own is None else own

    def _checked(self, floats: Tensor) -> Tensor:
        check_finite(self.file, [(self.name, floats)])
        return floats


def read_later(linear: nn.Linear, name: str, tensor: StoredTensor, file: str) -> None:
    """Have a layer's weight read from ``tensor`` when the layer is packed, whatever its own weight holds until then."""
    linear.stored = [StoredRows(linear.out_features, name, tensor, file)]  # type: ignore[assignment]


def is_read_later(linear: nn.Linear) -> bool:
    """Whether some of a layer's rows are still to be read from the checkpoint."""
    return any(rows.tensor is not None for rows in stored_rows(linear))


def stored_rows(linear: nn.Linear) -> list[StoredRows]:
    """The tensors of a layer's outputs, in order."""
    found: list[StoredRows] = getattr(linear, "stored", [StoredRows(linear.weight.shape[0], "", None, "")])
    return found


def in_whole_numbers(
    linear: nn.Linear,
    kept: Callable[[GroupedWeight], GroupedWeight | None],
    rounded: Callable[[Tensor], GroupedWeight],
) -> GroupedWeight:
    """A layer's weight: each part as in its file, if ``kept`` finds a form for that, else its floats ``rounded``."""
    stored = stored_rows(linear)
    weights = linear.weight.detach().split([rows.outputs for rows in stored])
    return stacked([rows.packed(weight, kept, rounded) for rows, weight in zip(stored, weights, strict=True)])


def join(whole: nn.Linear, linears: Iterable[nn.Linear]) -> None:
    """Note that ``whole`` has the outputs of ``linears``, one after the other."""
    whole.stored = [rows for linear in linears for rows in stored_rows(linear)]  # type: ignore[assignment]


# ----------------------------------------------------------------------------------------------------------------- int4
# Linear layers of four-bit weights in groups, each with a scale and a minimum.

INT4_BITS: Final = 4
"""Bits of a weight in this form."""


class Int4Linear(WholeLinear):
    """A linear layer with weights ``scale * value + minimum``, values of four bits."""

    def __init__(self, linear: nn.Linear) -> None:
        weight = in_four_bits(linear)
        assert weight.minimums is not None
        scales = scales_in_blocks(weight.scales, weight.minimums)
        super().__init__(int4_blocks(weight.values), scales, INT4_BITS, shift_of(weight), linear)


def int4_blocks(values: Tensor) -> Tensor:
    """[O, I], 0 .. 15 -> bytes in the order that ``compiled.dot`` describes."""
    halves = values.unflatten(1, (-1, 2, 4)).unflatten(0, (-1, LANES))  # blocks, outputs, pairs of four inputs, 2, 4
    low, high = halves.permute(3, 0, 2, 1, 4)
    return (low | high << INT4_BITS).contiguous().flatten()


def in_four_bits(linear: nn.Linear) -> GroupedWeight:
    """A layer's weight as values from 0 to 15 with scales and minimums: the file's own where possible, else rounded."""
    return in_whole_numbers(linear, from_zero, lambda weight: in_groups(weight, INT4_BITS, GROUP))


def from_zero(weight: GroupedWeight) -> GroupedWeight | None:
    """The weight's numbers as values from 0 to 15 and minimums; None if the kernel has no such form."""
    if weight.bits > INT4_BITS or weight.group % GROUP:
        return None
    lowest = 2 ** (weight.bits - 1) if weight.values.dtype == torch.int8 else 0
    # Signed values are raised to begin at 0; the minimums make up for that.
    minimums = -lowest * weight.scales if weight.minimums is None else weight.minimums
    if weight.zeros is not None:
        minimums = minimums - weight.zeros * weight.scales
    values = (weight.values + lowest).to(torch.uint8)
    found = GroupedWeight(values, weight.scales, minimums, INT4_BITS, weight.group)
    # The greatest common divisor with 256 is a power of two, as ``shift_of`` needs it, and at least ``GROUP``.
    return found.divided(math.gcd(weight.group, LARGEST_GROUP))


def fits_int4(linear: nn.Linear) -> bool:
    """Whether the compiled loops can compute a layer of this shape."""
    outputs, inputs = linear.weight.shape
    return bool(inputs % GROUP == 0 and outputs % LANES == 0)


# ----------------------------------------------------------------------------------------------------------------- int8
# Linear layers of int8 weights in groups, each with a scale.

INT8_BITS: Final = 8
"""Bits of a weight in this form."""


class Int8Linear(WholeLinear):
    """A linear layer with weights ``scale * value``, values of eight bits."""

    def __init__(self, linear: nn.Linear, weight: GroupedWeight | None = None) -> None:
        weight = in_eight_bits(linear) if weight is None else weight
        blocks, scales = int8_blocks(weight.values), scales_in_blocks(weight.scales)
        super().__init__(blocks, scales, INT8_BITS, shift_of(weight), linear)
        self._group, self._blocks, self._scales = weight.group, blocks, scales

    def rows(self, ids: Tensor) -> Tensor:
        """The weights of single outputs, float32: [..] -> [.., in]."""
        block, lane = ids // LANES, ids % LANES
        # [blocks, fours of inputs, outputs, 4]: the fours of one output, one after the other, are its inputs.
        values = self._blocks[block, :, lane].flatten(-2).float()
        scales = self._scales[block, :, 0, lane].float().repeat_interleave(self._group, -1)
        return (values * scales)[..., : self.inputs]


def in_eight_bits(linear: nn.Linear) -> GroupedWeight:
    """A layer's weight as values from -127 to 127 with scales: the file's own where possible, else rounded."""
    return in_whole_numbers(linear, signed, rounded)


def signed(weight: GroupedWeight) -> GroupedWeight | None:
    """The weight's numbers in groups that the loops can use; None if the loops have no such form.

    Outputs with a -128 are rounded anew, since it has no positive counterpart in a byte, which ``dot.dot`` needs.
    """
    plain = weight.values.dtype == torch.int8 and weight.minimums is None and weight.zeros is None
    if not plain or weight.group % GROUP:
        return None
    found = weight.divided(math.gcd(weight.group, LARGEST_GROUP))
    lowest = (found.values == -(2 ** (INT8_BITS - 1))).any(1)
    if not lowest.any():
        return found
    # These outputs alone and in the same groups, so that ranks that share the outputs compute with the same bits.
    anew = in_signed_groups(found.rows(lowest).dequantize(), INT8_BITS, found.group)
    values, scales = found.values.clone(), found.scales.clone()
    values[lowest], scales[lowest] = anew.values, anew.scales
    return replace(found, values=values, scales=scales)


def rounded(weight: Tensor) -> GroupedWeight:
    """A float weight [out, in] rounded, with the inputs padded by zeros to whole groups."""
    return in_signed_groups(weight, INT8_BITS, GROUP)


def int8_blocks(values: Tensor) -> Tensor:
    """int8 [O, I] in the order that ``compiled.dot`` describes: blocks, fours of inputs, outputs, 4."""
    outputs, inputs = values.shape
    values = nn.functional.pad(values, (0, 0, 0, raised(outputs, LANES) - outputs))
    return values.view(-1, LANES, inputs // 4, 4).transpose(1, 2).contiguous()


# --------------------------------------------------------------------------------------------------------------- sliced
# Linear layers whose weights stay whole numbers on a device that has no products of them.
#
# At every call the weights become floats again, a slice of outputs at a time, by torch's own operations. They are the
# numbers that a dequantised file has, rounded once to the format of the rows. A kernel would read four bits for a
# weight; this moves about 25 bytes for it, where floats in 16 bits take two.

MOST_FLOATS: Final = 1 << 24
"""The most weights that are floats at once: 64 MiB in float32, and half of that in the format of the rows."""


class SlicedLinear(nn.Module):
    """Replaces ``linear``, with the whole numbers of ``weight``, which may have more inputs: the others are zeros."""

    values: Tensor
    scales: Tensor
    minimums: Tensor | None
    bias: Tensor | None

    def __init__(self, linear: nn.Linear, weight: GroupedWeight) -> None:
        super().__init__()
        self.outputs, self.inputs = linear.weight.shape
        self._halves = weight.bits == 4
        self._group = weight.group
        self.register_buffer("values", in_bytes(weight.values) if self._halves else weight.values)
        self.register_buffer("scales", weight.scales.half())
        self.register_buffer("minimums", None if weight.minimums is None else weight.minimums.half())
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach())

    def forward(self, hidden: Tensor) -> Tensor:
        """[.., in] -> [.., out]"""
        step = max(1, MOST_FLOATS // self.inputs)
        parts = [slice(first, first + step) for first in range(0, self.outputs, step)]
        found = [F.linear(hidden, self._floats(part).to(hidden.dtype), self._bias(part)) for part in parts]
        return found[0] if len(found) == 1 else torch.cat(found, dim=-1)

    def rows(self, ids: Tensor) -> Tensor:
        """The weights of single outputs, float32: [..] -> [.., in]."""
        return self._floats(ids)

    def _bias(self, part: slice) -> Tensor | None:
        return None if self.bias is None else self.bias[part]

    def _floats(self, part: slice | Tensor) -> Tensor:
        """The weights of some outputs, float32 [.., in]."""
        values = self.values[part]
        if self._halves:
            # ``in_bytes`` has put the even input into the lower half.
            values = torch.stack([values & 15, values >> 4], dim=-1).flatten(-2)
        grouped, scales = values.unflatten(-1, (-1, self._group)).float(), self.scales[part].float()[..., None]
        if self.minimums is None:
            grouped = grouped * scales
        else:
            grouped = torch.addcmul(self.minimums[part].float()[..., None], grouped, scales)
        return grouped.flatten(-2)[..., : self.inputs]


def in_bytes(values: Tensor) -> Tensor:
    """Values from 0 to 15, [O, I], two to a byte: [O, I / 2]. The even one has the lower bits."""
    even, odd = values.unflatten(-1, (-1, 2)).unbind(-1)
    return even | odd << 4
