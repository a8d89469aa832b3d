"""FlowSpec's findings (Liu et al., 2025, Tables 1 to 3) beside ours."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from benchmarks.papers import flowspec, flowspec_eagle
from benchmarks.sections.findings.verdicts import (
    OTHER,
    SIMULATED,
    Finding,
    figures_of,
    of_all,
    of_ratio,
    ranged,
)
from benchmarks.sections.flowspec import eagle_runs
from benchmarks.shared.published import published
from benchmarks.shared.simulations import find, over, said

PAPER: Final = "FlowSpec"
FITTED: Final = f"{SIMULATED}; the 13B's speed is fitted to this table"
EAGLE: Final = "in virtual time, drafters of a million tokens"
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
        yield "Table 1", claim, stated, *bounded(pair(), "flowspec", base, EVERY), FITTED
        for drafter, runs in eagles().items():
            yield "Table 1", f"{claim}, with {drafter}", stated, *bounded(runs, "flowspec", base, EVERY), EAGLE


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
        yield "Table 2", claim, stated, *bounded(pair(), strategy, base, SEVEN), SIMULATED
        for drafter, runs in eagles().items():
            yield "Table 2", f"{claim}, with {drafter}", stated, *bounded(runs, strategy, base, SEVEN), EAGLE


def others(paper: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Findings on texts and models that we lack: rows of a finding."""
    piped, flowed = paper["7B, Vicuna"][1]
    sampled = {"demo pair": figures_of("flowspec")["T1"], **{name: runs[-1] for name, runs in eagles().items()}}
    ratios = [
        f"{said(over(find(runs, 'flowspec', *SEVEN), find(runs, flowspec.PIPEDEC, *SEVEN)))} {name}"
        for name, runs in sampled.items()
    ]
    yield (
        "4.2",
        "behind PipeDec where few drafts are accepted (Vicuna 7B, T = 1)",
        f"{flowed / piped:.2f}x",
        f"7B, T = 1: {', '.join(ratios)}",
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


def bounded(source: Sequence[Any], strategy: str, base: str, clusters: Sequence[str]) -> tuple[str, str]:
    """The least and the most of the ratios of all runs, with bounds, and the verdict on all of them."""
    found = [over(find(runs, strategy, cluster), find(runs, base, cluster)) for cluster in clusters for runs in source]
    least = min(found, key=lambda one: one.low or one.mean)
    most = max(found, key=lambda one: one.high or one.mean)
    ours = f"{said(least)} at the least, {said(most)} at the most of {len(found)}"
    return ours, of_all(map(of_ratio, found))


def pair() -> Sequence[Any]:
    """The runs with the demo pair and with the synthetic profile."""
    return list(figures_of("flowspec").values())


def eagles() -> Mapping[str, Sequence[Any]]:
    """The runs at T = 0 and at T = 1, by drafter."""
    runs = eagle_runs(figures_of("flowspec_eagle"))
    return {
        label: [runs[label, name] for name in flowspec_eagle.TEMPERATURES] for label in flowspec_eagle.METHODS.values()
    }
