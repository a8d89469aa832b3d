"""FlowSpec's findings (Liu et al., 2025, Tables 1 and 2) beside ours."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from benchmarks.papers import flowspec
from benchmarks.sections.findings.verdicts import SIMULATED, Finding, figures_of, of_all, of_cases, of_ratio, ranged
from benchmarks.shared.published import published
from benchmarks.shared.simulations import find, over, said
from penstock.lab.report import times

PAPER: Final = "FlowSpec"


def findings() -> Iterator[Finding]:
    paper = published("flowspec")
    simulated, eagle = figures_of("flowspec"), eagle_runs()

    def finding(place: str, claim: str, stated: str, ours: str, verdict: str, how: str = SIMULATED) -> Finding:
        return Finding(paper=PAPER, place=place, claim=claim, stated=stated, ours=ours, verdict=verdict, how=how)

    def bounded(place: str, claim: str, stated: str, strategy: str, base: str, clusters: Sequence[str]) -> Finding:
        found = [
            over(find(runs, strategy, cluster), find(runs, base, cluster))
            for cluster in clusters
            for runs in simulated.values()
        ]
        least = min(found, key=lambda one: one.low or one.mean)
        most = max(found, key=lambda one: one.high or one.mean)
        ours = f"{said(least)} at the least, {said(most)} at the most of {len(found)}"
        return finding(place, claim, stated, ours, of_all(map(of_ratio, found)))

    def unbounded(place: str, claim: str, stated: str, strategy: str, base: str) -> Finding:
        found = [
            find(runs, base, cluster)["ms_per_token"] / find(runs, strategy, cluster)["ms_per_token"]
            for cluster in flowspec.CLUSTERS.values()
            for runs in eagle.values()
        ]
        ours = f"{' and '.join(map(times, found[:2]))} (7B), {' and '.join(map(times, found[2:]))} (13B)"
        return finding(
            place, claim, stated, ours, of_cases([one > 1 for one in found]), "in virtual time, EAGLE-3, no bounds"
        )

    rows = [cells for row in paper["table_1"].values() for cells in row]
    over_naive = f"{ranged(cells[1] for cells in rows)}x"
    over_pipedec = f"{ranged(cells[1] / cells[0] for cells in rows)}x"
    second = paper["table_2"]
    every, seven = [*flowspec.CLUSTERS.values()], [flowspec.CLUSTERS["7B"]]
    yield bounded("Table 1", "faster than naive PP", over_naive, "flowspec", flowspec.NAIVE, every)
    yield unbounded("Table 1", "the same, with EAGLE", over_naive, "flowspec", flowspec.NAIVE)
    yield bounded("Table 1", "faster than PipeDec, width 16", over_pipedec, "flowspec", flowspec.PIPEDEC, every)
    yield unbounded("Table 1", "the same, with EAGLE", over_pipedec, "flowspec", flowspec.PIPEDEC)
    pruned, order = (
        f"{ranged(one / other for one, other in zip(second[name], second[base], strict=True))}x"
        for name, base in (("without score order", "pruned"), ("flowspec", "without score order"))
    )
    stated = f"{ranged(second['pruned'])}x"
    yield bounded(
        "Table 2", "pruning alone is faster than naive PP", stated, flowspec.NO_EXPANSION, flowspec.NAIVE, seven
    )
    yield bounded("Table 2", "expansion adds to that", pruned, flowspec.NO_ORDER, flowspec.NEITHER, seven)
    yield bounded("Table 2", "so does the order by score", order, "flowspec", flowspec.NO_ORDER, seven)


def eagle_runs() -> dict[str, list[Any]]:
    """Runs with EAGLE by temperature, of both clusters."""
    figures = figures_of("flowspec_eagle")
    return {name: [run for row in figures.values() for run in row[name]] for name in ("T0", "T1")}
