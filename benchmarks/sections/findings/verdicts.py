"""A paper's finding beside ours, and the verdict that the figures give."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from benchmarks.shared.measured import stored
from benchmarks.shared.simulations import said
from penstock.lab.report import Ratio

HOLDS: Final = "holds here"
LESS: Final = "holds here, smaller"
PARTLY: Final = "holds here in part"
OPEN: Final = "undecided here"
FAILS: Final = "does not hold here"
OTHER: Final = "not comparable"
VERDICTS: Final = {
    HOLDS: "The same direction here, and as large as the least that the paper has, or without a size there.",
    LESS: "The same direction here, but smaller: our bounds are below the paper's size, or all of our figures are.",
    PARTLY: "It is so in some of our settings; in others it is otherwise, or our bounds include both directions.",
    OPEN: "Our bounds include both directions, or the samples are too few to tell.",
    FAILS: "Here it is otherwise.",
    OTHER: "What was measured differs too much, is not stated there, or was not measured here.",
}
"""Verdicts in the order of the page, and what each means."""

SIMULATED: Final = "simulated"
VIRTUAL: Final = "in virtual time, no bounds"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """``place``: section, table or figure of the paper. ``stated``: the paper's figure, ``ours``: that which decides.

    ``how`` is the kind of our figures, or the reason why they cannot be compared.
    """

    paper: str
    place: str
    claim: str
    stated: str
    ours: str
    verdict: str
    how: str


def of_ratio(ratio: Ratio, stated: float = 1.0) -> str:
    """The verdict on "more than once as fast", which the paper has as at least ``stated`` times."""
    low, high = ratio.bounds or (ratio.mean, ratio.mean)
    if low > 1:
        return HOLDS if high >= stated else LESS
    return FAILS if high < 1 else OPEN


def of_all(verdicts: Iterable[str]) -> str:
    """The verdict on a finding from those on its settings."""
    found = set(verdicts)
    if len(found) == 1:
        return found.pop()
    if found & {HOLDS, LESS}:
        return LESS if found == {HOLDS, LESS} else PARTLY
    return FAILS


def of_every(verdicts: Iterable[str]) -> str:
    """The verdict on a finding that needs each of these: one that fails or is undecided decides."""
    found = set(verdicts)
    return next((one for one in (FAILS, OPEN) if one in found), of_all(found))


def of_cases(cases: Sequence[bool]) -> str:
    """The verdict on a finding that is so in these of all settings, without bounds."""
    return HOLDS if all(cases) else PARTLY if any(cases) else FAILS


def of_sizes(cases: Sequence[bool], ours: Iterable[float], stated: Iterable[float]) -> str:
    """The verdict of ``of_cases``, or "smaller" where each of our ratios is nearer to 1 than the paper's beside it."""
    verdict = of_cases(cases)
    smaller = all(abs(math.log(one)) < abs(math.log(theirs)) for one, theirs in zip(ours, stated, strict=True))
    return LESS if verdict == HOLDS and smaller else verdict


def counted(cases: Sequence[bool], what: str) -> str:
    return f"in {sum(cases)} of {len(cases)} {what}"


def ranged(values: Iterable[float], form: str = ".2f") -> str:
    """``0.83 to 0.86``, or one number where both are written alike."""
    found = sorted(values)
    least, most = (f"{one:z{form}}" for one in (found[0], found[-1]))  # z: a small negative number is no -0.00
    return least if least == most else f"{least} to {most}"


def least_and_most(ratios: Sequence[Ratio]) -> tuple[Ratio, Ratio]:
    return min(ratios, key=lambda one: one.mean), max(ratios, key=lambda one: one.mean)


def extremes(ratios: Sequence[Ratio]) -> str:
    """Two ratios, or the least and the most of more."""
    if len(ratios) <= 2:
        return " and ".join(map(said, ratios))
    least, most = map(said, least_and_most(ratios))
    return f"{least} at the least, {most} at the most of {len(ratios)}"


def figures_of(name: str) -> Any:
    return stored(name).figures
