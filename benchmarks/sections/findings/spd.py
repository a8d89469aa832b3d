"""SPD's findings (Wang et al., 2026, sections 4.3 and 4.4, appendix B.1) beside ours."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from statistics import geometric_mean
from typing import Any, Final

from benchmarks.costs.spd_overhead import LOST
from benchmarks.sections.findings.verdicts import (
    OTHER,
    VIRTUAL,
    Finding,
    counted,
    extremes,
    figures_of,
    of_all,
    of_cases,
    of_ratio,
    ranged,
)
from benchmarks.sections.spd import CELLS
from benchmarks.shared.paired import unpaired
from benchmarks.shared.published import published
from penstock.lab.report import Ratio

PAPER: Final = "SPD"
CHATS: Final = "in virtual time, with SmolLM2-135M-Instruct"
CLAIMED: Final = tuple(cell for cell in CELLS if cell != "T=0 W=4")
"""The cells in which the paper has SPD ahead of EAGLE-3: all but those of trees at T = 0."""
Cells = Mapping[str, Mapping[str, tuple[float, float]]]
"""L' and the speed-up in theory by row and cell, of the paper's means or of ours."""


def lengths() -> tuple[Cells, Cells]:
    """The paper's means (Tables 1 and 2), and ours."""
    means = published("spd")["mean"]
    theirs = {
        key: {cell: (one[0], one[-1]) for cell, one in zip(CELLS, row, strict=True)} for key, row in means.items()
    }
    ours = {
        key: {cell: (one["length"], one["theoretical"]) for cell, one in row["cells"].items()}
        for key, row in figures_of("spd_tables").items()
    }
    return theirs, ours


def spd_keys(layers: Iterable[int], stages: Iterable[int] = (4, 8, 16), states: str = "") -> list[str]:
    return [f"spd n={n} Ls={ls}{states}" for n in stages for ls in layers]


def with_more_stages(table: Cells) -> list[bool]:
    pairs = zip(spd_keys((1, 2, 4), (4, 8)), spd_keys((1, 2, 4), (8, 16)), strict=True)
    return greater(table, pairs)


def with_more_layers(table: Cells) -> list[bool]:
    return greater(table, zip(spd_keys((1, 2)), spd_keys((2, 4)), strict=True))


def greater(table: Cells, pairs: Iterable[tuple[str, str]], what: int = 0) -> list[bool]:
    """Whether the second row of a pair has more in a cell than the first, for all cells of the pairs that are there."""
    there = [pair for pair in pairs if pair[0] in table and pair[1] in table]
    return [table[more][cell][what] > table[less][cell][what] for less, more in there for cell in CELLS]


def longer_by_states(table: Cells) -> list[bool]:
    return greater(table, zip(spd_keys((1, 2, 4)), spd_keys((1, 2, 4), states=" output states"), strict=True))


def slower_by_states(table: Cells) -> list[bool]:
    return greater(table, zip(spd_keys((1, 2, 4), states=" output states"), spd_keys((1, 2, 4)), strict=True), what=1)


def ahead_of_exits(table: Cells) -> list[bool]:
    """Whether SPD's best module has more in theory than the early exit, by stages and cell."""
    return [
        best_of_spd(table, n, cell) > table[f"early_exit n={n} Ls=1"][cell][1] for n in (4, 8, 16) for cell in CELLS
    ]


def best_of_spd(table: Cells, stages: int, cell: str, what: int = 1) -> float:
    return max(table[key][cell][what] for key in spd_keys((1, 2, 4), (stages,)) if key in table)


def fewer_in_theory(table: Cells) -> list[bool]:
    return greater(table, [("eagle3 n=16 Ls=1", "eagle3 n=8 Ls=1")], what=1)


def exits_accept_less(table: Cells) -> list[bool]:
    """Whether the early exit accepts less than SPD's longest, by stages and cell."""
    return [
        table[f"early_exit n={n} Ls=1"][cell][0] < best_of_spd(table, n, cell, what=0)
        for n in (4, 8, 16)
        for cell in CELLS
    ]


def exits_behind_eagle(table: Cells) -> list[bool]:
    return greater(table, [(f"early_exit n={n} Ls=1", f"eagle3 n={n} Ls=1") for n in (4, 8, 16)])


def exits_fall(table: Cells) -> list[bool]:
    return greater(table, [(f"early_exit n={2 * n} Ls=1", f"early_exit n={n} Ls=1") for n in (4, 8)], what=1)


def gain_of_trees(row: Mapping[str, tuple[float, float]], temperature: int) -> float:
    """How many times as much a tree of width 4 accepts as a chain."""
    return row[f"T={temperature} W=4"][0] / row[f"T={temperature} W=1"][0]


def without_states(table: Cells, methods: tuple[str, ...]) -> list[Mapping[str, tuple[float, float]]]:
    return [row for key, row in table.items() if key.startswith(methods) and not key.endswith("states")]


def longer_by_trees(table: Cells) -> list[bool]:
    return [gain_of_trees(row, at) > 1 for row in without_states(table, ("spd", "eagle3")) for at in (0, 1)]


def trees_gain_when_sampled(table: Cells) -> list[bool]:
    return [gain_of_trees(row, 1) > gain_of_trees(row, 0) for row in without_states(table, ("spd",))]


def falls(table: Cells) -> tuple[list[float], float]:
    """The part of L' over eight stages that goes from T = 0 to T = 1 in a chain: of SPD's modules, and of EAGLE-3."""

    def fall(key: str) -> float:
        return 1 - table[key]["T=1 W=1"][0] / table[key]["T=0 W=1"][0]

    return [fall(key) for key in spd_keys((1, 2, 4), (8,))], fall("eagle3 n=8 Ls=1")


def findings() -> Iterator[Finding]:
    def finding(place: str, claim: str, stated: str, ours: str, verdict: str, how: str = VIRTUAL) -> Finding:
        return Finding(paper=PAPER, place=place, claim=claim, stated=stated, ours=ours, verdict=verdict, how=how)

    theirs, ours = lengths()
    for place, claim, cases, what in (
        ("4.3", "L' grows with the stages", with_more_stages, "pairs of cells"),
        ("4.3", "L' grows with the module's layers", with_more_layers, "pairs of cells"),
        ("4.3, Table 1", "SPD's best module is ahead of the early exit in theory", ahead_of_exits, "cells"),
        ("4.3", "the early exit accepts less than SPD's longest module", exits_accept_less, "cells"),
        ("4.3", "the early exit's speed-up in theory falls with more stages", exits_fall, "pairs of cells"),
        ("4.3", "EAGLE-3's speed-up in theory falls when it drafts 15 tokens for 7", fewer_in_theory, "cells"),
        ("4.3", "a tree (W = 4) accepts more than a chain: SPD and EAGLE-3", longer_by_trees, "pairs of cells"),
        ("4.3", "a tree lengthens what SPD accepts more at T = 1 than at T = 0", trees_gain_when_sampled, "rows"),
        ("4.4, Table 2", "output states make L' longer", longer_by_states, "cells"),
        ("4.4, Table 2", "output states make it slower in theory, since every step waits", slower_by_states, "cells"),
    ):
        found = cases(ours)
        yield finding(place, claim, counted(cases(theirs), what), counted(found, what), of_cases(found))
    (paper, eagles), (own, eagle) = falls(theirs), falls(ours)
    yield finding(
        "4.3",
        "sampling costs SPD less than EAGLE-3 (L' of a chain over eight stages, from T = 0 to T = 1)",
        f"{ranged(paper, '.0%')} less, EAGLE-3 {eagles:.0%}",
        f"{ranged(own, '.0%')} less, EAGLE-3 {eagle:.0%}",
        of_cases([one < eagle for one in own]),
        "in virtual time, no bounds; accepted by shared noise, not by rejection sampling",
    )
    yield from (finding(*cells) for cells in spd_others())


def trained_alike(table: Cells, module: str) -> list[bool]:
    """Whether one of SPD's modules has more in theory than an EAGLE-3 of as many tokens and updates: one layer, 4 and 8
    stages, in the cells of the paper's claim."""
    recipes, found = figures_of("spd_recipes"), []
    for n in (4, 8):
        own, eagle = (recipes[f"{name} n={n}"]["lengths"] for name in (module.format(n), "eagle3-small-steps"))
        for cell in CLAIMED:
            length, theory = table[f"eagle3 n={n} Ls=1"][cell]
            found.append(own[cell] > eagle[cell] * theory / length)
    return found


def trees_of_exits(theirs: Cells, ours: Cells) -> Iterator[tuple[str, ...]]:
    """Gains by a tree with the early exit, and by 15 drafts with EAGLE-3: rows of a finding."""

    def gains(table: Cells) -> list[float]:
        return [gain_of_trees(row, at) for row in without_states(table, ("early_exit",)) for at in (0, 1)]

    def more_drafts(table: Cells) -> list[float]:
        fewer, more = (table[f"eagle3 n={n} Ls=1"] for n in (8, 16))
        return [more[cell][0] / fewer[cell][0] for cell in CELLS]

    for claim, found in (
        ("a tree lengthens what the early exit accepts little, or shortens it", gains),
        ("15 drafts in place of 7 hardly lengthen what EAGLE-3 accepts", more_drafts),
    ):
        paper, own = found(theirs), found(ours)
        no_more = [one <= other for one, other in zip(own, paper, strict=True)]
        beside = f"{ranged(own)}x, no more than the paper's {counted(no_more, 'cells')}"
        yield "4.3", claim, f"{ranged(paper)}x", beside, of_cases(no_more), VIRTUAL


def spd_others() -> Iterator[tuple[str, ...]]:
    """EAGLE-3 trained alike, steps, and chats: rows of a finding."""
    theirs, ours = lengths()
    paper = [
        best_of_spd(theirs, n, cell) > theirs[f"eagle3 n={n} Ls=1"][cell][1] for n in (4, 8, 16) for cell in CLAIMED
    ]
    alike, anchors = trained_alike(ours, "paper-{}"), trained_alike(ours, "anchors")
    yield (
        "4.3, Table 1",
        "in theory SPD is ahead of EAGLE-3, but for trees at T = 0",
        counted(paper, "cells"),
        f"one layer, 4 and 8 stages: {counted(alike, 'cells')} with the variant `paper`, {counted(anchors, 'cells')} "
        "with `anchors`, beside an EAGLE-3 of as many tokens and updates",
        of_cases([*alike, *anchors]),
        f"{VIRTUAL}; the learning rates of the variants may differ",
    )
    yield (
        "4.3",
        "the early exit accepts less than EAGLE-3",
        counted(exits_behind_eagle(theirs), "cells"),
        counted(exits_behind_eagle(ours), "cells"),
        OTHER,
        "EAGLE-3 had a quarter of the exits' updates",
    )
    yield from trees_of_exits(theirs, ours)
    steps = [one for one in figures_of("spd_overhead").values() if one["lag"] == 0]
    yield (
        "repository",
        "its own code reaches less of its theory the more stages there are",
        ", ".join(f"{1 - LOST[one['cluster']]:.2f}" for one in steps),
        ", ".join(f"{one['share']:.2f}" for one in steps),
        OTHER,
        "ours are emulated steps, theirs those of a GPU",
    )
    yield from by_texts()


def by_texts() -> Iterator[tuple[str, ...]]:
    """Lengths by set of prompts: rows of a finding."""
    paper = published("spd")
    for place, claim, name, other in (
        ("B.1, Tables 3 and 4", "every method accepts more on GSM8K than on MT-Bench", "gsm8k", "mt_bench"),
        ("B.1, Tables 4 and 5", "every method accepts most on HumanEval, more than on GSM8K", "humaneval", "gsm8k"),
    ):
        pairs = [
            (one[0], less[0])
            for key, row in paper[name].items()
            if key in paper[other]
            for one, less in zip(row, paper[other][key], strict=True)
        ]
        stated = counted([one > less for one, less in pairs], "cells")
        ratios = list(longer(name, other))
        ours = f"{extremes(ratios)} drafters, all cells together"
        yield place, claim, stated, ours, of_all(map(of_ratio, ratios)), CHATS


def longer(name: str, other: str) -> Iterator[Ratio]:
    """L' on one set of prompts over that on another, by row of the chat model's tables.

    A question's L' is the geometric mean of its four cells, which have the same questions.
    """
    chats = figures_of("spd_chats")
    for key, row in chats.items():
        if key.startswith(f"{name} "):
            yield unpaired(by_question(row), by_question(chats[key.replace(name, other, 1)]))


def by_question(row: Mapping[str, Any]) -> list[float]:
    return list(map(geometric_mean, zip(*(row["cells"][cell]["lengths"] for cell in CELLS), strict=True)))
