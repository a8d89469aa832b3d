"""Compiles loops, and keeps their machine code on disk, in a folder for each version of the sources.

Numba checks only the file of a function; functions that are compiled into it from other files may have changed since.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from numba import cfunc, config, njit

from penstock.files import cache_folder

OPTIONS: Final = {"nogil": True, "error_model": "numpy"}
REORDERED: Final = {"contract", "reassoc", "nsz", "arcp"}


def exact(function: Callable[..., Any]) -> Any:
    """Compile a loop in which every operation rounds as written."""
    return _njit(function)


def fast(function: Callable[..., Any]) -> Any:
    """Compile a loop whose sums may be reordered into vectors, in the same order for every row of one length."""
    return _njit(function, fastmath=REORDERED)


def part(function: Callable[..., Any]) -> Any:
    """Compile a function that becomes part of loops that are kept, and is not kept by itself."""
    return njit(**OPTIONS)(function)


def called_by_address(signature: Any, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Compile a function that other machine code calls by its address."""

    def compile_(function: Callable[..., Any]) -> Any:
        with _keeping() as kept:
            return cfunc(signature, cache=kept, **OPTIONS, **options)(function)

    return compile_


def _njit(function: Callable[..., Any], **options: Any) -> Any:
    with _keeping() as kept:
        return njit(cache=kept, **OPTIONS, **options)(function)


@contextmanager
def _keeping() -> Iterator[bool]:
    """Point Numba's cache at ``folder`` within the block, where it decorates. Yields whether the code can be kept."""
    before, place = config.CACHE_DIR, folder()
    config.CACHE_DIR = before if place is None else str(place)
    try:
        yield place is not None
    finally:
        config.CACHE_DIR = before


@functools.cache
def folder() -> Path | None:
    """The folder of compiled code; None where nothing can be written."""
    try:
        place = cache_folder() / "compiled" / digest()
        place.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):
        return None
    return place


def digest() -> str:
    """A hash of the sources of all compiled code."""
    found = hashlib.sha256()
    for file in sorted(Path(__file__).parent.glob("*.py")):
        found.update(file.read_bytes())
    return found.hexdigest()[:16]
