"""``--sweep stages=2..64,width=8..128``: values that the number of stages and strategies' options go through."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from itertools import product
from typing import Final

from penstock.bench.entries import own_options, strategy_of
from penstock.config import FieldError, check, nearest
from penstock.speculation import names_of
from penstock.strategies.registry import STRATEGIES

STAGES: Final = "stages"

Sweep = Mapping[str, tuple[int, ...]]
"""The values of each axis."""
Settings = dict[str, int]
"""One value of each axis that applies."""


def swept_options() -> list[str]:
    """Names of all strategies' options that are numbers."""
    declared = (field for kind in STRATEGIES.values() for field in fields(kind))
    return list(dict.fromkeys(field.name for field in declared if type(field.default) is int))


def parse_sweep(text: str) -> Sweep:
    """Each axis with its values. Raises FieldError naming the axis and what is wrong with it."""
    axes: dict[str, tuple[int, ...]] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        axis, _, values = (piece.strip() for piece in part.partition("="))
        known = [STAGES, *swept_options()]
        if axis not in known:
            raise FieldError("sweep", f"axis {axis!r} is unknown; {nearest(axis, known)}")
        if axis in axes:
            raise FieldError("sweep", f"axis {axis!r} is given twice; remove one")
        axes[axis] = numbers_of(axis, values)
    return axes


def numbers_of(axis: str, text: str) -> tuple[int, ...]:
    """The powers-of-two series in ``2..64``. Raises FieldError unless doubling leads from the first
    value to the last."""
    bounds = re.fullmatch(r"([1-9]\d*)(?:\.\.([1-9]\d*))?", text)
    if bounds is None:
        raise FieldError("sweep", f"axis {axis} is {text!r}; write FIRST..LAST, for example {axis}=2..64")
    first, last = int(bounds[1]), int(bounds[2] or bounds[1])
    values = [first]
    while values[-1] < last:
        values.append(2 * values[-1])
    if values[-1] != last:
        near = f"{values[-2]} or {values[-1]}" if len(values) > 1 else str(first)
        raise FieldError("sweep", f"{axis}={text}: doubling {first} does not lead to {last}; end at {near}")
    return tuple(values)


def expanded(entries: Sequence[str], sweep: Sweep) -> list[tuple[str, str, Settings]]:
    """Each entry with every combination of the axes that are options of its strategy and that it does not set itself.

    Returns (entry as given, entry with the options, the options). Raises FieldError for an axis that no entry leaves
    open.
    """
    found, used = [], {STAGES}
    for entry in entries:
        own = own_options(entry)
        axes = [axis for axis in sweep if axis in names_of(STRATEGIES[strategy_of(entry)]) and axis not in own]
        used.update(axes)
        for values in product(*(sweep[axis] for axis in axes)):
            settings = dict(zip(axes, values, strict=True))
            found.append((entry, with_options(entry, settings), settings))
    for axis in sweep:
        check(axis in used, "sweep", axis, f"an option that one of {', '.join(entries)} has, and does not set itself")
    return found


def with_options(entry: str, settings: Settings) -> str:
    """The entry with further options in its brackets."""
    if not settings:
        return entry
    more = ",".join(f"{option}={value}" for option, value in settings.items())
    return f"{entry[:-1]},{more}]" if entry.endswith("]") else f"{entry}[{more}]"
