"""What loading takes beside the weights goes back to the system at once.

glibc keeps freed memory for later. It learns to keep pieces of up to 32 MiB, and a model that is dequantised and packed
tensor by tensor leaves so many of them behind that a stage would hold nearly twice its weights.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Final

M_TRIM_THRESHOLD: Final = -1
M_MMAP_THRESHOLD: Final = -3
"""glibc's names and numbers, malloc.h."""
LARGE: Final = 1 << 18
"""Bytes from which a piece of memory is the system's own while a stage loads: smaller than any matrix that matters."""
USUAL: Final = 32 << 20
"""What glibc itself goes up to. Activations then stay with the process, and cost no page faults."""


@contextlib.contextmanager
def returned_at_once() -> Iterator[None]:
    """Large pieces that are freed in the ``with`` block are the system's again. Without glibc it does nothing."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        yield
        return
    mallopt(M_MMAP_THRESHOLD, LARGE)
    try:
        yield
    finally:
        mallopt(M_MMAP_THRESHOLD, USUAL)
        mallopt(M_TRIM_THRESHOLD, 2 * USUAL)
