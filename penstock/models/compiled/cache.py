"""Records that compiled loops receive by address, and the folder that keeps the loops' machine code."""

from __future__ import annotations

import functools
import hashlib
import logging
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
from numba import cfunc, config, from_dtype, njit, types
from numba.core import caching
from numba.extending import intrinsic

from penstock.files import cache_folder
from penstock.models.compiled.dot import instruction

# -------------------------------------------------------------------------------------------------------------- records
# Records that compiled functions receive by address: numbers and further addresses.
#
# Shapes as in ``compiled.products``. An address of 0 means that something does not exist. Code that fills in an address
# keeps the memory there alive for as long as it may be read.

ADDRESS: Final = np.int64
NUMBER: Final = np.int64


def record(*fields: tuple[str, Any]) -> np.dtype[Any]:
    return np.dtype(list(fields), align=True)


INT4, INT8, BFLOAT16, FLOAT16, FLOAT32 = 4, 8, 16, 17, 32
"""Forms of weights, of the rows that they are multiplied with, and of keys and values. Each number is that of its bits,
but for float16, since bfloat16 has 16."""

NORM: Final = record(("weight", ADDRESS), ("width", NUMBER), ("least", np.float32))
"""An ``RMSNorm``."""
WEIGHTS: Final = record(
    ("values", ADDRESS), ("scales", ADDRESS), ("form", NUMBER), ("shift", NUMBER), ("inputs", NUMBER),
    ("outputs", NUMBER),
)  # fmt: skip
"""A linear layer, as in ``products.Weights``; inputs and outputs are padded to whole groups and blocks."""
ROWS: Final = record(("numbers", ADDRESS), ("scales", ADDRESS), ("sums", ADDRESS), ("count", NUMBER))
"""Rows in the form that products take. Whole numbers have scales and sums, see ``compiled.dot``."""
PRODUCT: Final = record(
    ("weights", WEIGHTS), ("rows", ROWS), ("out", ADDRESS), ("counters", ADDRESS), ("threads", NUMBER)
)
ATTENTION: Final = record(
    ("query", ADDRESS), ("query_head", NUMBER), ("query_row", NUMBER), ("keys", ADDRESS), ("key_group", NUMBER),
    ("key_slot", NUMBER), ("values", ADDRESS), ("value_group", NUMBER), ("value_slot", NUMBER), ("rows", ADDRESS),
    ("starts", ADDRESS), ("slots", ADDRESS), ("units", NUMBER), ("groups", NUMBER), ("out", ADDRESS),
    ("out_row", NUMBER), ("out_head", NUMBER), ("scaling", np.float32), ("softcap", np.float32), ("sinks", ADDRESS),
    ("counters", ADDRESS), ("threads", NUMBER), ("attend", ADDRESS),
)  # fmt: skip
"""``query_head``, ``key_slot`` and the like are strides in bytes. A unit is a row's query heads of one group."""
LAYER: Final = record(
    ("input_norm", NORM), ("qkv", WEIGHTS), ("bias", ADDRESS), ("query_norm", NORM), ("key_norm", NORM),
    ("o_proj", WEIGHTS), ("mlp_norm", NORM), ("gate_up", WEIGHTS), ("down_proj", WEIGHTS),
)  # fmt: skip
STACK: Final = record(
    ("layers", ADDRESS), ("attentions", ADDRESS), ("count", NUMBER), ("queries", NUMBER), ("groups", NUMBER),
    ("width", NUMBER), ("inner", NUMBER), ("own_change", NUMBER), ("own_opened", NUMBER),
    ("hidden", ADDRESS), ("normed", ADDRESS), ("qkv", ADDRESS),
    ("query", ADDRESS), ("cos", ADDRESS), ("sin", ADDRESS), ("slots", ADDRESS), ("attended", ADDRESS),
    ("change", ADDRESS), ("gates", ADDRESS), ("opened", ADDRESS), ("rows", ROWS), ("form", NUMBER),
    ("counters", ADDRESS), ("threads", NUMBER), ("first", NUMBER), ("last", NUMBER),
)  # fmt: skip
"""Layers and the buffers that they share; ``inner`` is F, ``count`` the number of layers.

A run goes through the phases [first, last), counted over all layers. Of a tensor parallel rank ``queries``, ``groups``
and ``inner`` are its own, and ``own_change`` and ``own_opened`` say how many bytes of a row stand before its own.

``form`` is that of hidden states between layers, and of keys and values; the states lie in float32.
"""


def pointer_to(kind: Any) -> Any:
    """A function for compiled code that turns an address into a pointer for ``carray``."""

    @intrinsic
    def pointer(typing: Any, address: Any) -> Any:
        def generate(context: Any, build: Any, signature: Any, arguments: Any) -> Any:
            return build.inttoptr(arguments[0], context.get_value_type(signature.return_type))

        return types.CPointer(kind)(types.int64), generate

    return pointer


floats, numbers = pointer_to(types.float32), pointer_to(types.int64)
words, shorts = pointer_to(types.uint32), pointer_to(types.uint16)
PRODUCT_TYPE, ATTENTION_TYPE = from_dtype(PRODUCT), from_dtype(ATTENTION)
LAYER_TYPE, STACK_TYPE = from_dtype(LAYER), from_dtype(STACK)
layers_at, attentions_at, norms_at = map(pointer_to, (LAYER_TYPE, ATTENTION_TYPE, from_dtype(NORM)))


def address_of(array: np.ndarray) -> int:
    """The address of the first byte of an array, which has to outlive it."""
    return int(array.ctypes.data)


# ----------------------------------------------------------------------------------------------------------------- kept
# Compiles loops, and keeps their machine code on disk, in a folder for each version of the sources.
#
# Numba checks only the file of a function; functions that are compiled into it from other files may have changed since.
# Nor does it expect processes that compile at the same time, as the stages of a pipeline do on a new machine: it
# numbers the files of a function's machine code, so that two of them can give one name to code for different types or
# constants. Within the code it numbers functions, too, in each process anew: two closures of one function over
# different constants can have one name in the code of two processes, and whoever loads both runs one of them in the
# place of the other. Closures are therefore named by what they close over.

log = logging.getLogger(__name__)

OPTIONS: Final = {"nogil": True, "error_model": "numpy"}
"""Numba's options: loops run without the interpreter's lock, and divide by 0 as the processor does, without a check."""


class OwnNames(caching.IndexDataCacheFile):  # type: ignore[misc]
    """Numba's index of a function's files, which names a file by a hash of its key instead of by a running number."""

    def save(self, key: Any, data: Any) -> None:
        """Keep ``data``. Of two processes that save at once one may lose its entry in the index, and compiles anew."""
        name = self._data_name(int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:8]))
        try:
            self._save_data(name, data)
            self._save_index({**self._load_index(), key: name})
        except OSError as error:  # a full disk: this process has the code all the same
            log.debug("compiled code is not kept: %s", error)


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
        with tempfile.TemporaryFile(dir=place):  # another user's folder may be there, or a disk that is only read
            pass
    except (OSError, RuntimeError):
        return None
    return place


def digest() -> str:
    """A hash of the sources of all compiled code."""
    found = hashlib.sha256()
    for file in sorted(Path(__file__).parent.glob("*.py")):
        found.update(file.read_bytes())
    return found.hexdigest()[:16]
