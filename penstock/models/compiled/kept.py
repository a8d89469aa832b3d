"""Compiles loops and keeps their machine code on disk, apart for every version of what they are made of.

Numba looks at the file of a function alone; what the function calls, and is compiled into it, may have changed since.
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
    """For loops whose every operation rounds as it is written."""
    return _njit(function)


def fast(function: Callable[..., Any]) -> Any:
    """For loops whose sums the compiler may reorder into vectors; the same order for every row of one length."""
    return _njit(function, fastmath=REORDERED)


def part(function: Callable[..., Any]) -> Any:
    """For what is compiled into loops that are kept, and not kept by itself."""
    return njit(**OPTIONS)(function)


def called_by_address(signature: Any, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """For functions that other machine code calls."""

    def compile_(function: Callable[..., Any]) -> Any:
        with _keeping() as kept:
            return cfunc(signature, cache=kept, **OPTIONS, **options)(function)

    return compile_


def _njit(function: Callable[..., Any], **options: Any) -> Any:
    with _keeping() as kept:
        return njit(cache=kept, **OPTIONS, **options)(function)


@contextmanager
def _keeping() -> Iterator[bool]:
    """Whether what is compiled can be kept; Numba notes where as a function is decorated."""
    before, place = config.CACHE_DIR, folder()
    config.CACHE_DIR = before if place is None else str(place)
    try:
        yield place is not None
    finally:
        config.CACHE_DIR = before


@functools.cache
def folder() -> Path | None:
    """None where nothing can be written."""
    try:
        place = cache_folder() / "compiled" / digest()
        place.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):
        return None
    return place


def digest() -> str:
    """Of everything that is compiled."""
    found = hashlib.sha256()
    for file in sorted(Path(__file__).parent.glob("*.py")):
        found.update(file.read_bytes())
    return found.hexdigest()[:16]
