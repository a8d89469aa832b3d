"""Returning memory to the system as soon as loading frees it.

glibc keeps freed memory for later. It adapts to keep blocks of up to 32 MiB, and a model that is dequantised and packed
tensor by tensor frees so many of them that a stage would hold nearly twice its weights.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Final

M_TRIM_THRESHOLD: Final = -1
M_MMAP_THRESHOLD: Final = -3
"""Parameters of glibc's mallopt (malloc.h)."""
LARGE: Final = 1 << 18
"""Size in bytes from which an allocation is mapped from the system on its own while a stage loads: any large matrix."""
USUAL: Final = 32 << 20
"""The limit in bytes up to which glibc itself goes. Activations then stay with the process, without page faults."""


@contextlib.contextmanager
def returned_at_once() -> Iterator[None]:
    """Within the block, freed large blocks of memory return to the system at once. Does nothing without glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        yield
        return
    mallopt(M_MMAP_THRESHOLD, LARGE)
    try:
        yield
    finally:
        mallopt(M_MMAP_THRESHOLD, USUAL)
        # mallopt has turned off glibc's own adaptation, which would set the trim threshold to twice the other.
        mallopt(M_TRIM_THRESHOLD, 2 * USUAL)
