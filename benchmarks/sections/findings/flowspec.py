"""FlowSpec's findings (Liu et al., 2025, Tables 1 to 3) beside ours."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any, Final

from benchmarks.papers import flowspec, flowspec_eagle, six_sets
from benchmarks.sections.findings.verdicts import (
    FAILS,
    HOLDS,
    LESS,
    OPEN,
    OTHER,
    SIMULATED,
    Finding,
    extremes,
    figures_of,
    least_and_most,
    of_all,
    of_ratio,
    ranged,
)
from benchmarks.sections.flowspec import eagle_runs
from benchmarks.shared.published import published
from benchmarks.shared.simulations import find, over, said
from penstock.lab.report import Ratio

PAPER: Final = "FlowSpec"
FITTED: Final = f"{SIMULATED}; the 13B's speed is fitted to this table"
EAGLE: Final = "in virtual time, drafters of a million tokens"
LOOKED_UP: Final = "in virtual time, with SmolLM2-135M-Instruct, drafts looked up in the text"
LEARNED: Final = (
    "in virtual time, with SmolLM2-135M-Instruct, few short answers; a drafter that learned from little text"
)
IN_CHATS: Final = {
    six_sets.LOOKUP: "",
    "medusa": ", with Medusa",
    "eagle3": ", with EAGLE-3",
    "dspark": ", with DSpark",
    "headrace": ", with Headrace",
}
"""The end of a finding's text, by the method that drafted for the chat model."""
BEHIND: Final = {HOLDS: FAILS, LESS: FAILS, FAILS: HOLDS, OPEN: OPEN}
"""The verdict on "slower" by that on "faster"."""
EVERY, SEVEN = (*flowspec.CLUSTERS.values(),), (flowspec.CLUSTERS["7B"],)


def findings() -> Iterator[Finding]:
    paper = published("flowspec")
    parts = speeds(paper["table_1"]), by_sets(paper["sets"]), ablations(paper["table_2"]), others(paper["table_1"])
    for rows in parts:
        for place, claim, stated, ours, verdict, how in rows:
            yield Finding(paper=PAPER, place=place, claim=claim, stated=stated, ours=ours, verdict=verdict, how=how)


def speeds(paper: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Table 1: rows of a finding."""
    rows = [cells for row in paper.values() for cells in row]
    for claim, base, stated in (
        ("faster than naive PP", flowspec.NAIVE, [cells[1] for cells in rows]),
        ("faster than PipeDec, width 16", flowspec.PIPEDEC, [cells[1] / cells[0] for cells in rows]),
    ):
        yield "Table 1", claim, as_times(stated), *bounded(pair(), [("flowspec", base)], EVERY, stated), FITTED
        for drafter, runs in eagles().items():
            ours = bounded(runs, [("flowspec", base)], EVERY, stated)
            yield "Table 1", f"{claim}, with {drafter}", as_times(stated), *ours, EAGLE
        if base == flowspec.PIPEDEC:  # naive PP stands set by set
            for drafted, *chats in in_chats([("flowspec", base)], stated):
                yield "Table 1", f"{claim}, in chats{drafted}", as_times(stated), *chats


def ablations(paper: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Table 2: rows of a finding.

    The paper does not say whether its pruned pipeline keeps the score order, so that both stand for it.
    """
    pruned, order = (
        [one / other for one, other in zip(paper[name], paper[base], strict=True)]
        for name, base in (("without score order", "pruned"), ("flowspec", "without score order"))
    )
    both = (flowspec.NO_EXPANSION, flowspec.NEITHER)
    for claim, stated, ways in (
        ("pruning alone is faster than naive PP", paper["pruned"], [(one, flowspec.NAIVE) for one in both]),
        ("expansion adds to pruning", pruned, [(flowspec.NO_ORDER, one) for one in both]),
        ("the order by score adds to both", order, [("flowspec", flowspec.NO_ORDER)]),
    ):
        yield "Table 2", claim, as_times(stated), *bounded(pair(), ways, SEVEN, stated), SIMULATED
        for drafter, runs in eagles().items():
            ours = bounded(runs, ways, SEVEN, stated)
            yield "Table 2", f"{claim}, with {drafter}", as_times(stated), *ours, EAGLE
        for drafted, *chats in in_chats(ways, stated):
            yield "Table 2", f"{claim}, in chats{drafted}", as_times(stated), *chats


def as_times(ratios: Sequence[float]) -> str:
    return f"{ranged(ratios)}x"


def in_chats(ways: Sequence[tuple[str, str]], stated: Sequence[float]) -> Iterator[tuple[str, ...]]:
    """The end of a finding's text, and ours, for each method that drafted for the chat model, all sets together.

    ``ways`` are strategies and their bases, ``stated`` the paper's ratios.
    """
    for method, drafted in IN_CHATS.items():
        sets = [rows for temperature in six_sets.TEMPERATURES if (rows := all_sets(temperature, method))]
        entries = [(rows, *way) for rows in sets for way in ways if set(way) <= rows[0]["entries"].keys()]
        if chats := [six_sets.speed_up(*entry) for entry in entries]:
            verdict = of_all(of_ratio(one, min(stated)) for one in chats)
            yield drafted, extremes(chats), verdict, LEARNED if drafted else LOOKED_UP


def others(paper: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Findings on texts and models that we lack: rows of a finding."""
    piped, flowed = paper["7B, Vicuna"][1]
    sampled = {"demo pair": figures_of("flowspec")["T1"], **{name: runs[-1] for name, runs in eagles().items()}}
    ratios = {
        name: over(find(runs, "flowspec", *SEVEN), find(runs, flowspec.PIPEDEC, *SEVEN))
        for name, runs in sampled.items()
    }
    if looked_up := all_sets(1.0):
        ratios["SmolLM2 with lookup"] = six_sets.speed_up(looked_up, "flowspec", flowspec.PIPEDEC)
    yield (
        "4.2",
        "behind PipeDec where few drafts are accepted (Vicuna 7B, T = 1)",
        f"{flowed / piped:.2f}x",
        f"7B, T = 1: {', '.join(f'{said(one)} {name}' for name, one in ratios.items())}",
        of_all(BEHIND[of_ratio(one)] for one in ratios.values()),
        "in virtual time; the paper states no rates of acceptance",
    )
    yield (
        "A.2, Table 3",
        "three runs hardly differ",
        "standard deviation at most 0.23% of the mean",
        "not measured",
        OTHER,
        "virtual time does not fluctuate",
    )


def by_sets(paper: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Speeds on six prompt sets, with a chat model: rows of a finding."""
    for (method, drafted), (number, temperature) in product(IN_CHATS.items(), enumerate(six_sets.TEMPERATURES)):
        theirs = [row[number] for row in paper.values()]
        ours = list(set_speeds(temperature, method).values())
        if len(ours) < len(six_sets.SETS):
            continue
        how = LEARNED if drafted else LOOKED_UP
        yield (
            "4.2, Table 1",
            f"faster than naive PP on each of six data sets, T = {temperature:g}{drafted}",
            f"{ranged(one for row in theirs for one in row)}x",
            extremes(ours),
            of_all(of_ratio(one, min(map(min, theirs))) for one in ours),
            how,
        )
        if temperature:
            continue  # sampled, the speed-ups of the paper's sets differ
        least, most = least_and_most(ours)
        apart = max(max(row) / min(row) for row in theirs)
        assert least.high is not None
        assert most.low is not None
        yield (
            "4.2",
            f"nearly as fast on each of six data sets, T = 0{drafted}",
            f"the fastest has {ranged(max(row) / min(row) for row in theirs)} times the speed-up of the slowest",
            f"{most.mean / least.mean:.2f}x",
            FAILS if most.low / least.high > apart else HOLDS if most.mean / least.mean <= apart else OPEN,
            how,
        )


def set_speeds(temperature: float, method: str) -> Mapping[str, Ratio]:
    """FlowSpec's speed over naive PP on each set, with one method of drafting."""
    rows = set_rows(temperature, method)
    return {name: six_sets.speed_up(some, "flowspec", flowspec.NAIVE) for name, some in rows.items()}


def set_rows(temperature: float, method: str) -> Mapping[str, Sequence[Any]]:
    """The same measurements as ``all_sets`` by set."""
    rows: dict[str, list[Any]] = {}
    for one in all_sets(temperature, method):
        rows.setdefault(one["set"], []).append(one)
    return rows


def all_sets(temperature: float, method: str = six_sets.LOOKUP) -> Sequence[Any]:
    """The measurements of all sets over FlowSpec's boards, with one method of drafting."""
    return six_sets.cases_of(figures_of(six_sets.NAME), SEVEN[0], temperature, method)


def bounded(
    source: Sequence[Any], ways: Sequence[tuple[str, str]], clusters: Sequence[str], stated: Sequence[float]
) -> tuple[str, str]:
    """The ratios of all runs with their bounds, and the verdict on all beside the paper's ratios.

    ``ways`` are strategies and their bases.
    """
    found = [
        over(find(runs, strategy, cluster), find(runs, base, cluster))
        for cluster in clusters
        for runs in source
        for strategy, base in ways
    ]
    return extremes(found), of_all(of_ratio(one, min(stated)) for one in found)


def pair() -> Sequence[Any]:
    """The runs with the demo pair and with the synthetic profile."""
    return list(figures_of("flowspec").values())


def eagles() -> Mapping[str, Sequence[Any]]:
    """The runs at T = 0 and at T = 1, by drafter."""
    runs = eagle_runs(figures_of("flowspec_eagle"))
    return {
        label: [runs[label, name] for name in flowspec_eagle.TEMPERATURES] for label in flowspec_eagle.METHODS.values()
    }
