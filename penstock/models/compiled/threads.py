"""Torch's own threads for compiled loops: a team that waits for its next work, a few microseconds away.

Torch's products run on the threads of an OpenMP runtime. Compiled loops ask the same runtime, so that no second team
competes with the first one for the cores.
"""

from __future__ import annotations

import ctypes
import functools
import os
from typing import Any, Final

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

LIBRARY: Final = "libgomp.so.1"
ENTRY: Final = "GOMP_parallel"
"""void GOMP_parallel(void (*work)(void *), void *data, unsigned threads, unsigned flags), as compilers call it."""


@functools.cache
def parallel() -> int:
    """The address of the function that has a team work; 0 where torch has come with another runtime."""
    try:
        # Not loaded anew: the one that torch has loaded, by its name.
        library = ctypes.CDLL(LIBRARY, os.RTLD_NOLOAD | os.RTLD_NOW)
        return ctypes.cast(library[ENTRY], ctypes.c_void_p).value or 0
    except (OSError, AttributeError):
        return 0


@intrinsic
def share(typing: Any, parallel: Any, work: Any, data: Any, threads: Any) -> Any:
    """Have so many threads call ``work`` with ``data``. Returns when all have returned. All are addresses."""

    def generate(_: Any, build: Any, __: Any, arguments: Any) -> Any:
        address, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [address, address, number, number])
        function = build.inttoptr(arguments[0], kind.as_pointer())
        places = [build.inttoptr(argument, address) for argument in arguments[1:3]]
        build.call(function, [*places, build.trunc(arguments[3], number), ir.Constant(number, 0)])

    return types.void(types.int64, types.int64, types.int64, types.int64), generate


@intrinsic
def taken(typing: Any, pointer: Any, count: Any) -> Any:
    """The number at ``pointer`` before ``count`` is added to it: what no other thread gets."""

    def generate(_: Any, build: Any, __: Any, arguments: Any) -> Any:
        return build.atomic_rmw("add", arguments[0], arguments[1], "monotonic")

    return types.int64(types.CPointer(types.int64), types.int64), generate
