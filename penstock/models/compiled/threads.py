"""Torch's own threads for compiled loops: a team that waits for its next work, a few microseconds away.

Torch's products run on the threads of an OpenMP runtime. Compiled loops use the same runtime, so that no second team
competes with it for the cores.

A team goes through phases whose units nobody hands out: each thread takes the next ones. A phase is over once all of
its units are done, by any thread: one that has lost its core delays only the units that it has taken.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
from typing import Any, Final

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from penstock.models.compiled.cache import exact

LIBRARY: Final = "libgomp.so.1"
ENTRY: Final = "GOMP_parallel"
"""The function void GOMP_parallel(void (*work)(void *), void *data, unsigned threads, unsigned flags)."""
LINE: Final = 8
"""Int64 numbers in a cache line: two counters that different threads write are this far apart."""
COUNTERS: Final = 2 * LINE
"""Int64 numbers of a phase: the first counts units taken; the second, a cache line behind it, counts units done."""
PARTS: Final = 4
"""Pieces into which each thread's share of a phase is cut, so that others can do more of it when a thread is late."""
PATIENCE: Final = 1 << 10
"""Looks at a counter after which a thread yields its core. With fewer a thread gives it up between two phases; with
more it keeps it from others on a busy host."""
ADDRESS, NUMBER, LONG = ir.IntType(8).as_pointer(), ir.IntType(32), ir.IntType(64)


@functools.cache
def parallel() -> int:
    """The address of the function that starts a team; 0 where torch uses another runtime."""
    try:
        # RTLD_NOLOAD finds the library that torch has loaded, by its name, and loads no other.
        library = ctypes.CDLL(LIBRARY, os.RTLD_NOLOAD | os.RTLD_NOW)
        return ctypes.cast(library[ENTRY], ctypes.c_void_p).value or 0
    except (OSError, AttributeError):
        return 0


@intrinsic
def _share(typing: Any, parallel: Any, work: Any, data: Any, threads: Any) -> Any:
    """Have ``threads`` threads call ``work`` with ``data``, all addresses; returns when all have returned."""

    def generate(_: Any, build: Any, __: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [ADDRESS, ADDRESS, NUMBER, NUMBER])
        function = build.inttoptr(arguments[0], kind.as_pointer())
        places = [build.inttoptr(argument, ADDRESS) for argument in arguments[1:3]]
        build.call(function, [*places, build.trunc(arguments[3], NUMBER), ir.Constant(NUMBER, 0)])

    return types.void(types.int64, types.int64, types.int64, types.int64), generate


@intrinsic
def _call(typing: Any, function: Any, data: Any) -> Any:
    """Call the function at an address with the address ``data``."""

    def generate(_: Any, build: Any, __: Any, arguments: Any) -> Any:
        function = build.inttoptr(arguments[0], ir.FunctionType(ir.VoidType(), [ADDRESS]).as_pointer())
        build.call(function, [build.inttoptr(arguments[1], ADDRESS)])

    return types.void(types.int64, types.int64), generate


@exact
def share(parallel: int, work: int, data: int, threads: int) -> None:
    """Have ``threads`` threads call ``work`` with ``data``, all addresses; returns when all have returned."""
    if threads == 1:
        _call(work, data)
    else:
        _share(parallel, work, data, threads)


@intrinsic
def call_units(typing: Any, function: Any, data: Any, first: Any, last: Any) -> Any:
    """Call the function at an address for the units [first, last) of the record at the address ``data``."""

    def generate(_: Any, build: Any, __: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [ADDRESS, LONG, LONG])
        function = build.inttoptr(arguments[0], kind.as_pointer())
        build.call(function, [build.inttoptr(arguments[1], ADDRESS), *arguments[2:]])

    return types.void(types.int64, types.int64, types.int64, types.int64), generate


@intrinsic
def taken(typing: Any, address: Any, count: Any) -> Any:
    """Add ``count`` to the number at an address.

    Returns the number before: the units from there on are this thread's.
    """
    # Monotonic: the counter alone is shared here; what the units hold is published by ``finished``.
    return types.int64(types.int64, types.int64), _added("monotonic")


@intrinsic
def finished(typing: Any, address: Any, count: Any) -> Any:
    """Add to the number at an address. A thread that reads it with ``_seen`` also sees all that was written before."""
    return types.int64(types.int64, types.int64), _added("release")


def _added(ordering: str) -> Any:
    def generate(_: Any, build: Any, __: Any, arguments: Any) -> Any:
        place = build.inttoptr(arguments[0], LONG.as_pointer())
        return build.atomic_rmw("add", place, arguments[1], ordering)

    return generate


@intrinsic
def _seen(typing: Any, address: Any) -> Any:
    """The number at an address; all that was written before its ``finished`` is then visible."""

    def generate(_: Any, build: Any, __: Any, arguments: Any) -> Any:
        return build.load_atomic(build.inttoptr(arguments[0], LONG.as_pointer()), "acquire", 8)

    return types.int64(types.int64), generate


@intrinsic
def _breathe(typing: Any) -> Any:
    """Leave more of the core to its other hardware thread for a moment."""

    def generate(_: Any, build: Any, __: Any, ___: Any) -> Any:
        if platform.machine() in ("aarch64", "arm64"):
            kind = ir.FunctionType(ir.VoidType(), [NUMBER])
            hint = cgutils.get_or_insert_function(build.module, kind, "llvm.aarch64.hint")
            build.call(hint, [ir.Constant(NUMBER, 1)])
        else:
            kind = ir.FunctionType(ir.VoidType(), [])
            build.call(cgutils.get_or_insert_function(build.module, kind, "llvm.x86.sse2.pause"), [])

    return types.void(), generate


@intrinsic
def _give_way(typing: Any) -> Any:
    """Let another thread have the core."""

    def generate(_: Any, build: Any, __: Any, ___: Any) -> Any:
        kind = ir.FunctionType(NUMBER, [])
        build.call(cgutils.get_or_insert_function(build.module, kind, "sched_yield"), [])

    return types.void(), generate


@exact
def await_units(address: int, count: int) -> None:
    """Return when the number at an address has reached ``count``."""
    looks = 0
    while _seen(address) < count:
        looks += 1
        if looks % PATIENCE:
            _breathe()
        else:
            _give_way()


@exact
def at_once(units: int, threads: int) -> int:
    """How many units a thread takes at a time."""
    return max(1, units // (threads * PARTS)) if threads > 1 else max(1, units)
