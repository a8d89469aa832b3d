"""FlowSpec's findings (Liu et al., 2025, Tables 1 to 3) beside ours."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from benchmarks.papers import flowspec
from benchmarks.sections.findings.verdicts import (
    OTHER,
    SIMULATED,
    Finding,
    figures_of,
    of_all,
    of_cases,
    of_ratio,
    ranged,
)
from benchmarks.shared.published import published
from benchmarks.shared.simulations import find, over, said
from penstock.lab.report import times

PAPER: Final = "FlowSpec"
FITTED: Final = f"{SIMULATED}; the 13B's speed is fitted to this table"
EAGLE: Final = "in virtual time, EAGLE-3, no bounds"
EVERY, SEVEN = (*flowspec.CLUSTERS.values(),), (flowspec.CLUSTERS["7B"],)


def findings() -> Iterator[Finding]:
    paper = published("flowspec")
    for rows in (speeds(paper["table_1"]), ablations(paper["table_2"]), others(paper["table_1"])):
        for place, claim, stated, ours, verdict, how in rows:
            yield Finding(paper=PAPER, place=place, claim=claim, stated=stated, ours=ours, verdict=verdict, how=how)


def speeds(paper: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Table 1: rows of a finding."""
    rows = [cells for row in paper.values() for cells in row]
    for claim, base, stated in (
        ("faster than naive PP", flowspec.NAIVE, f"{ranged(cells[1] for cells in rows)}x"),
        ("faster than PipeDec, width 16", flowspec.PIPEDEC, f"{ranged(cells[1] / cells[0] for cells in rows)}x"),
    ):
        yield "Table 1", claim, stated, *bounded("flowspec", base, EVERY), FITTED
        found = unbounded("flowspec", base, EVERY)
        ours = f"{' and '.join(map(times, found[:2]))} (7B), {' and '.join(map(times, found[2:]))} (13B)"
        yield "Table 1", f"{claim}, with EAGLE", stated, ours, of_cases([one > 1 for one in found]), EAGLE


def ablations(paper: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Table 2: rows of a finding."""
    pruned, order = (
        f"{ranged(one / other for one, other in zip(paper[name], paper[base], strict=True))}x"
        for name, base in (("without score order", "pruned"), ("flowspec", "without score order"))
    )
    for claim, stated, strategy, base in (
        (
            "pruning alone is faster than naive PP",
            f"{ranged(paper['pruned'])}x",
            flowspec.NO_EXPANSION,
            flowspec.NAIVE,
        ),
        ("expansion adds to pruning", pruned, flowspec.NO_ORDER, flowspec.NEITHER),
        ("the order by score adds to both", order, "flowspec", flowspec.NO_ORDER),
    ):
        yield "Table 2", claim, stated, *bounded(strategy, base, SEVEN), SIMULATED
        found = unbounded(strategy, base, SEVEN)
        ours = " and ".join(map(times, found))
        yield "Table 2", f"{claim}, with EAGLE", stated, ours, of_cases([one > 1 for one in found]), EAGLE


def others(paper: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Findings on texts and models that we lack: rows of a finding."""
    piped, flowed = paper["7B, Vicuna"][1]
    demo = figures_of("flowspec")["T1"]
    ratio = said(over(find(demo, "flowspec", *SEVEN), find(demo, flowspec.PIPEDEC, *SEVEN)))
    eagle = times(unbounded("flowspec", flowspec.PIPEDEC, SEVEN)[1])
    yield (
        "4.2",
        "behind PipeDec where few drafts are accepted (Vicuna 7B, T = 1)",
        f"{flowed / piped:.2f}x",
        f"7B, T = 1: {ratio} demo pair, {eagle} EAGLE-3",
        OTHER,
        "the paper states no rates of acceptance, and has two targets where we have one",
    )
    yield (
        "4.2",
        "nearly as fast on each of six data sets",
        "1.64 to 1.70x (Llama-2 13B, T = 0)",
        "not measured",
        OTHER,
        "code alone was measured",
    )
    yield (
        "A.2, Table 3",
        "three runs hardly differ",
        "standard deviation at most 0.23% of the mean",
        "not measured",
        OTHER,
        "virtual time does not fluctuate",
    )


def bounded(strategy: str, base: str, clusters: Sequence[str]) -> tuple[str, str]:
    """The least and the most of the simulated ratios, with bounds, and the verdict on all of them."""
    found = [
        over(find(runs, strategy, cluster), find(runs, base, cluster))
        for cluster in clusters
        for runs in figures_of("flowspec").values()
    ]
    least = min(found, key=lambda one: one.low or one.mean)
    most = max(found, key=lambda one: one.high or one.mean)
    ours = f"{said(least)} at the least, {said(most)} at the most of {len(found)}"
    return ours, of_all(map(of_ratio, found))


def unbounded(strategy: str, base: str, clusters: Sequence[str]) -> list[float]:
    """Ratios with EAGLE, at T = 0 and T = 1 of each cluster in turn."""
    figures = figures_of("flowspec_eagle")
    runs_of = {name: [run for row in figures.values() for run in row[name]] for name in ("T0", "T1")}
    return [
        find(runs, base, cluster)["ms_per_token"] / find(runs, strategy, cluster)["ms_per_token"]
        for cluster in clusters
        for runs in runs_of.values()
    ]
