"""SPD (Wang et al., 2026): Tables 1 to 5 beside ours, its steps in processes, and in-flight correction."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any

from benchmarks.costs import hop_floor
from benchmarks.drafters import correction, halfway, spd_chats
from benchmarks.papers import spd_tables
from benchmarks.sections.base import Section, by_script
from benchmarks.shared.measured import stored
from benchmarks.shared.published import published
from penstock.lab.report import bounds, paired_ratio, times

CELLS = tuple(
    spd_tables.cell_key(temperature, width) for width in spd_tables.WIDTHS for temperature in spd_tables.TEMPERATURES
)
"""The columns of a row, in the paper's order."""
PAPER = published("spd")
GOAL = 1.10
"""Ratio that in-flight correction is to reach on `spd-8`."""


def sizes(key: str) -> tuple[int, int]:
    """Stages and layers of a row."""
    stages, layers = (int(part.split("=")[1]) for part in key.split()[1:3])
    return stages, layers


def label(key: str) -> str:
    """A row's name; the ``paper`` variant is trained for its own n."""
    variant, _, key = key.rpartition(", ")
    name, (stages, layers) = key.split()[0], sizes(key)
    if name == "eagle3":
        return f"EAGLE-3, m = {stages - 1}"
    words = {"early_exit": "early exit (PPSD)", "spd": "SPD"}[name]
    states = ", output states" if key.endswith("states") else ""
    return f"{words}, n = {stages}, L_s = {layers}{states}{', trained for this n alone' if variant else ''}"


def slashed(values: Sequence[float]) -> str:
    return " / ".join(f"{value:.2f}" for value in values)


def cells_of(row: Mapping[str, Any]) -> list[Any]:
    return [row["cells"][name] for name in CELLS]


def ours(key: str, row: Mapping[str, Any]) -> list[str]:
    """Our row: length and theoretical speed-up, once where they are the same."""
    values = [tuple(dict.fromkeys((one["length"], one["theoretical"]))) for one in cells_of(row)]
    return [f"ours: {label(key)}", *(f"**{slashed(one)}**" for one in values)]


def by_method(keys: Sequence[str]) -> list[str]:
    """Rows by method, stages and layers, each once."""
    methods = spd_tables.METHODS
    return sorted(
        dict.fromkeys(keys), key=lambda key: (methods.index(key.split()[0]), key.endswith("states"), sizes(key))
    )


def identical(figures: Mapping[str, Any]) -> str:
    wrong = [key for key, row in figures.items() if not all(one["identical"] for one in cells_of(row))]
    return f"NOT identical to plain decoding: {', '.join(wrong)}." if wrong else "All outputs identical."


# ---------------------------------------------------------------------------------------------------- tables 1, 2 and 5


def tables_values(figures: Any) -> Mapping[str, Any]:
    """The paper's rows and ours, without those of methods that we lack."""
    measured = {(row["method"], row["output_states"]) for row in figures.values()}
    papers = [key for key in PAPER["mean"] if (key.split()[0], key.endswith("states")) in measured]
    return values_of(by_method([*papers, *figures]), figures)


def values_of(keys: Sequence[str], figures: Mapping[str, Any]) -> Mapping[str, Any]:
    """Rows of acceptance lengths, and of speed-ups on the presets."""
    presets = [
        [label(key), *(f"{times(one['preset'])} ({bounds(one['bounds'])})" for one in cells_of(figures[key]))]
        for key in by_method(list(figures))
    ]
    rows = [cells for key in keys for cells in table_rows(key, figures)]
    return {"headings": ["", *CELLS], "rows": rows, "preset_rows": presets, "identical": identical(figures)}


def table_rows(key: str, figures: Mapping[str, Any]) -> Iterator[list[str]]:
    """The paper's row, with HumanEval in brackets, and ours below it."""
    if key in PAPER["mean"]:
        code = PAPER["humaneval"].get(key)
        means = [slashed(mean) for mean in PAPER["mean"][key]]
        yield [f"paper: {label(key)}", *(f"{m} ({slashed(code[i])})" if code else m for i, m in enumerate(means))]
    if key in figures:
        yield ours(key, figures[key])


# ------------------------------------------------------------------------------------------------------ tables 3 and 4


def chats_values(figures: Any) -> Mapping[str, Any]:
    return {
        "headings": ["", *CELLS],
        "rows": {name: list(chat_rows(name, figures)) for name in spd_chats.SETS},
        "tokens": [cell["tokens"] for row in figures.values() for cell in cells_of(row)],
        "identical": identical(figures),
    }


def chat_rows(name: str, figures: Mapping[str, Any]) -> Iterator[list[str]]:
    """The rows of one set, the paper's and ours, by method, over the numbers of stages that we have."""
    own = {key.removeprefix(f"{name} "): row for key, row in figures.items() if key.startswith(f"{name} ")}
    stages = {row["stages"] for row in own.values()}
    papers = {key: row for key, row in PAPER[name].items() if sizes(key)[0] in stages}
    for key in by_method([*papers, *own]):
        if key in papers:
            yield [f"paper: {label(key)}", *map(slashed, papers[key])]
        if key in own:
            yield [f"ours: {label(key)}", *map(with_bounds, cells_of(own[key]))]


def with_bounds(cell: Mapping[str, Any]) -> str:
    """Length with its bounds, and the theoretical speed-up where it is another."""
    ratio = paired_ratio(cell["lengths"])
    assert ratio is not None
    theory = "" if cell["theoretical"] == cell["length"] else f" / {cell['theoretical']:.2f}"
    return f"**{cell['length']:.2f}** ({bounds(ratio.bounds)}){theory}"


# ----------------------------------------------------------------------------------------------- recipes and correction


def recipes_values(figures: Any) -> Mapping[str, Any]:
    return {"cells": CELLS, "same": all(row["identical"] for row in figures.values())}


def halfway_values(figures: Any) -> Mapping[str, Any]:
    """The most that a head gives that has learned this much, and how many tokens further gains would take."""
    curve = figures["curve"]
    best = [max(one["again"] for one in point["shares"].values()) for point in curve]
    gains = [after - before for before, after in pairwise(best)]
    needed = again_for(GOAL)
    learned = curve[-1]["learned"] / 1e6
    slow, fast = (learned * 2 ** ((needed - best[-1]) / gain) for gain in (fmean(gains), gains[-1]))
    above, ratio = next((row, found) for row, found in simulated_rows() if row["again"] >= best[-1])
    return {
        "again": best[-1],
        "above": above,
        "ratio": ratio,
        "goal": GOAL,
        "needed": needed,
        "gains": [f"{100 * gain:.1f}" for gain in gains],
        "slow": slow,
        "fast": fast,
    }


def again_for(goal: float) -> float:
    """How often simulated corrections have to be right again for this ratio on `spd-8`, interpolated in the stored
    rows."""
    rows = [(row["again"], ratio[0]) for row, ratio in simulated_rows()]
    (low, below), (high, above) = next(pair for pair in pairwise(rows) if pair[0][1] < goal <= pair[1][1])
    return float(low + (high - low) * (goal - below) / (above - below))


def simulated_rows() -> list[tuple[Mapping[str, Any], Sequence[float]]]:
    """Rows and ratios with bounds on `spd-8` with as many stages as the head was trained for, in ascending order."""
    simulated = stored(correction.NAME).figures["spd-8"]
    place = simulated["stages"].index(halfway.STAGES)
    return [(row, row["ratios"][place]) for row in simulated["corrected"]]


SECTIONS = {
    "spd_tables": Section(values=tables_values),
    "spd_chats": Section(values=chats_values),
    "spd_recipes": Section(values=recipes_values),
    "spd_hybrid": Section(values=lambda figures: values_of(list(figures), figures)),
    "spd_rejection": Section(values=lambda figures: {"label": label}),
    "hop_floor": by_script(hop_floor),
    "halfway": Section(values=halfway_values),
}
