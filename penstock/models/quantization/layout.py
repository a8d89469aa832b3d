"""Where oneDNN's layout has each number of a packed int8 weight, so that single rows can be read out of it.

The layout is the processor's, and nothing tells it. Numbers that say where they come from are packed, and found again:

    the weight's own [out, in]          packed, in blocks of outputs
    row 0:     0 1 2 3 4 5 ..     ->    0 1 2 3 . . . . 4 5 ..        columns: 0 1 2 3 256 257 ..
    column 0:  0 1 2 3 4 5 ..     ->    0 . . . 1 . . . 2 ..          rows:    0 4 8 ..
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Final

import numpy as np
import torch
from torch import Tensor

BASE: Final = 127
"""Of the digits that are packed, one at a time; each is written as 1 to 127, because 0 is what lies between."""
HIDDEN: Final = 1 << 62
"""Above every number."""
CHECKED: Final = 1 << 12
"""Most rows that are compared with the weight: as far apart as they can be."""


class PackedRows:
    """Reads rows of ``values`` [out, in], int8, from ``packed``, which was made of them.

    Raises LookupError where the layout puts them in no order that is found.
    """

    def __init__(self, packed: Tensor, values: Tensor) -> None:
        self._packed = packed  # the bytes are its own
        self._bytes = bytes_of(packed)
        outputs, inputs = values.shape
        self._rows = places(outputs, lambda digits: prepacked_column(digits, inputs))
        self._columns = places(inputs, lambda digits: prepacked_row(digits, outputs))
        self._columns = self._columns - self._columns[0]
        ids = torch.arange(0, outputs, -(-outputs // CHECKED))
        if not torch.equal(self.read(ids), values[ids]):
            raise LookupError("oneDNN's layout of int8 weights is in no order of rows and columns")

    def read(self, ids: Tensor) -> Tensor:
        """[..] -> [.., in], int8"""
        found: Tensor = self._bytes[self._rows[ids].unsqueeze(-1) + self._columns]
        return found


def places(count: int, packed_of: Callable[[Tensor], Tensor]) -> Tensor:
    """Where the numbers 0 .. ``count`` - 1 lie when they are packed [count]. Raises LookupError for a missing one."""
    numbers, candidates, found, unit = np.arange(count), np.empty(0, np.int64), np.empty(0, np.int64), 1
    while unit == 1 or unit < count:
        digits = torch.from_numpy((numbers // unit % BASE + 1).astype(np.int8))
        packed = packed_of(digits)
        read = bytes_of(packed).numpy()
        if unit == 1:
            candidates = np.flatnonzero(read > 0)
            found = np.zeros(len(candidates), np.int64)
        held = read[candidates].astype(np.int64)
        found = np.where(held > 0, found + unit * (held - 1), HIDDEN)
        unit *= BASE
    # Sums of rows lie behind the weight, and may look like numbers: the first one is meant.
    met, first = np.unique(found, return_index=True)
    if not np.array_equal(met[:count], numbers):
        raise LookupError("oneDNN's layout of int8 weights hides some of them")
    return torch.from_numpy(candidates[first[:count]])


def prepacked_row(digits_I: Tensor, outputs: int) -> Tensor:
    values = torch.zeros(outputs, len(digits_I), dtype=torch.int8)
    values[0] = digits_I
    return prepack(values)


def prepacked_column(digits_O: Tensor, inputs: int) -> Tensor:
    values = torch.zeros(len(digits_O), inputs, dtype=torch.int8)
    values[:, 0] = digits_O
    return prepack(values)


def prepack(values: Tensor) -> Tensor:
    """int8 [out, in] in oneDNN's layout."""
    packed: Tensor = torch.ops.onednn.qlinear_prepack(values, None)
    return packed


def bytes_of(packed: Tensor) -> Tensor:
    """The memory of a tensor in oneDNN's layout, which has to outlive it, as int8. Raises LookupError if hidden."""
    try:
        size, address = torch.ops.mkldnn._nbytes(packed), torch.ops.mkldnn.data_ptr(packed)
    except (AttributeError, RuntimeError) as error:
        raise LookupError(f"torch does not show where oneDNN holds a weight: {error}") from None
    return torch.frombuffer((ctypes.c_int8 * size).from_address(address), dtype=torch.int8)
