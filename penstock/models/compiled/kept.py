"""Compiles loops, and keeps their machine code on disk, in a folder for each version of the sources.

Numba checks only the file of a function; functions that are compiled into it from other files may have changed since.
Nor does it expect processes that compile at the same time, as the stages of a pipeline do on a new machine: it numbers
the files of a function's machine code, so that two of them can give one name to code for different types or constants.
Within the code it numbers functions, too, in each process anew: two closures of one function over different constants
can have one name in the code of two processes, and whoever loads both runs one of them in the place of the other.
Closures are therefore named by what they close over.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from numba import cfunc, config, njit
from numba.core import caching

from penstock.files import cache_folder
from penstock.models.compiled.dot import instruction

OPTIONS: Final = {"nogil": True, "error_model": "numpy"}


class OwnNames(caching.IndexDataCacheFile):  # type: ignore[misc]
    """Numba's index of a function's files, in which a file's name says what is in it."""

    def save(self, key: Any, data: Any) -> None:
        """Keep ``data``. Of two processes that save at once one may lose its entry in the index, and compiles anew."""
        name = self._data_name(int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:8]))
        self._save_data(name, data)
        self._save_index({**self._load_index(), key: name})


def named(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with a name that says what it closes over, if it is a closure."""
    if function.__closure__:
        said = hashlib.sha256(identity(function).encode()).hexdigest()[:16]
        function.__qualname__ = f"{function.__qualname__}_{said}"
    return function


def identity(value: Any) -> str:
    """Text that is equal for equal values, and for functions of the same code over equal values, in all processes."""
    function = getattr(value, "py_func", None) or getattr(value, "_defn", None) or value
    if (closure := getattr(function, "__closure__", None)) is None:
        return f"{function.__module__}.{function.__qualname__}" if callable(function) else repr(value)
    held = ", ".join(identity(cell.cell_contents) for cell in closure)
    return f"{function.__module__}.{function.__qualname__}({held})"


def exact(function: Callable[..., Any]) -> Any:
    """Compile a loop in which every operation rounds as written, on every processor."""
    with _keeping() as kept:
        return njit(cache=kept, **OPTIONS)(named(function))


def part(function: Callable[..., Any]) -> Any:
    """Compile a function that cached loops inline; it has no cache entry of its own."""
    return njit(**OPTIONS)(named(function))


def called_by_address(signature: Any) -> Callable[[Callable[..., Any]], Any]:
    """Compile a function that other machine code calls by its address."""

    def compile_(function: Callable[..., Any]) -> Any:
        if instruction() is None:
            return function  # nothing calls it, and LLVM would end the process for want of half-precision operations
        with _keeping() as kept:
            return cfunc(signature, cache=kept, **OPTIONS)(named(function))

    return compile_


@contextmanager
def _keeping() -> Iterator[bool]:
    """Point Numba's cache at ``folder`` within the block, where it decorates. Yields whether the code can be kept."""
    before, place = (config.CACHE_DIR, caching.IndexDataCacheFile), folder()
    config.CACHE_DIR, caching.IndexDataCacheFile = before[0] if place is None else str(place), OwnNames
    try:
        yield place is not None
    finally:
        config.CACHE_DIR, caching.IndexDataCacheFile = before


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
