"""Arrays of zeros that take memory as they are written to: a long context costs nothing until a text is that long."""

from __future__ import annotations

import mmap
import sys
from math import prod
from typing import Final

import torch
from torch import Tensor

LAZY: Final = sys.platform == "linux"
"""Whether private pages that are given up read as zeros again, as Linux has it."""


class ZeroPages:
    """Zeros [*shape] in the format and on the device of ``like``. On a CPU pages take memory when they are written to.

    numpy's and torch's own zeros do not serve: torch writes to all of them, and numpy asks for huge pages.
    """

    def __init__(self, like: Tensor, *shape: int) -> None:
        size = prod(shape) * like.element_size()
        self._pages: mmap.mmap | None = None
        if LAZY and like.device.type == "cpu" and size:
            self._pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self.array = torch.frombuffer(self._pages, dtype=like.dtype).view(shape)
        else:
            self.array = like.new_zeros(shape)

    def clear(self) -> None:
        """Set all to zero, at the same address, and give the memory back."""
        if self._pages is None:
            self.array.zero_()
        else:
            self._pages.madvise(mmap.MADV_DONTNEED)
