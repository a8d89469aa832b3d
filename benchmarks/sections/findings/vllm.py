"""The findings of the report on pipelines and EAGLE in vLLM (Zhao and Tong, sections 4.2 and 4.3) beside ours."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from benchmarks.papers import pp_eagle_table, pp_many
from benchmarks.sections.findings.verdicts import (
    SIMULATED,
    Finding,
    counted,
    figures_of,
    of_all,
    of_cases,
    of_every,
    of_ratio,
    of_sizes,
    ranged,
)
from benchmarks.shared.paired import paired
from benchmarks.shared.published import published
from benchmarks.shared.simulations import said
from penstock.lab.grid import PLAIN
from penstock.lab.report import Ratio

NAMES: Final = {"eagle": "EAGLE", "eagle3": "EAGLE-3"}
PAPER: Final = "vLLM report"
TRAINED: Final = "drafters of a million tokens"
ALL_RANKS: Final = "1,1,8"
Table = Mapping[str, Mapping[str, Sequence[float]]]
"""The report's Table 3: throughput and latency by model and way (dp,pp,tp)."""
Rows = Mapping[tuple[str, str], Mapping[str, Any]]
"""Ours, by model and way."""


def findings() -> Iterator[Finding]:
    paper = published("vllm")
    of_table_2 = (acceptance(paper["table_2"]), latencies(paper["table_2"]))
    for rows in (*of_table_2, designs(), many_sequences(paper["table_2"]), parallel(paper["parallel"])):
        for place, claim, stated, ours, verdict, how in rows:
            yield Finding(paper=PAPER, place=place, claim=claim, stated=stated, ours=ours, verdict=verdict, how=how)


def entries(method: str, stages: int) -> Any:
    """Ours of Table 2: one request at a time, by strategy."""
    return figures_of("pp_eagle_table")[f"{method} pp={stages}"]["entries"]


def conditions() -> str:
    one = next(iter(figures_of("pp_eagle_table").values()))
    return f"in virtual time, {one['prompts']} prompts of {one['tokens']} tokens"


def acceptance(paper: Table) -> Iterator[tuple[str, ...]]:
    """Accepted shares of Table 2: rows of a finding."""
    rates = {
        method: [entries(method, stages)[pp_eagle_table.CHAIN]["AR"] for stages in pp_eagle_table.SIZES]
        for method in pp_eagle_table.METHODS
    }
    theirs = {method: [row[0] for row in paper[method].values()] for method in rates}
    yield (
        "4.2, Table 2",
        "EAGLE-3 accepts more than EAGLE",
        f"{theirs['eagle3'][0]:.3f} and {theirs['eagle'][0]:.3f}",
        f"{rates['eagle3'][0]:.3f} and {rates['eagle'][0]:.3f}",
        of_cases([rates["eagle3"][0] > rates["eagle"][0]]),
        f"{conditions()}, no bounds; {TRAINED}",
    )
    spread, theirs_spread = (
        ", ".join(f"{NAMES[method]} {ranged(found, '.3f')}" for method, found in some.items())
        for some in (rates, theirs)
    )
    yield (
        "4.2, Table 2",
        "acceptance does not change with the stages",
        theirs_spread,
        spread,
        of_cases([max(found) - min(found) < 0.005 for found in rates.values()]),
        f"{conditions()}, no bounds",
    )


def latencies(paper: Table) -> Iterator[tuple[str, ...]]:
    """Latencies of Table 2 by the methods, as ratios: rows of a finding."""
    faster = {method: [over_none(method, stages) for stages in pp_eagle_table.SIZES] for method in NAMES}
    beside_eagle = [
        paired(*(entries(method, stages)[pp_eagle_table.CHAIN]["latencies"] for method in ("eagle", "eagle3")))
        for stages in pp_eagle_table.SIZES
    ]
    yield (
        "4.2, Table 2",
        "EAGLE-3 has the lowest latency of few sequences",
        "over 1, 2 and 4 stages",
        f"EAGLE's is {bare(beside_eagle)} times as long, and that without drafts {bare(faster['eagle3'])} times",
        of_all(of_every(map(of_ratio, pair)) for pair in zip(beside_eagle, faster["eagle3"], strict=True)),
        f"{conditions()}; {TRAINED}",
    )
    for method, name in NAMES.items():
        stated = [paper["none"][str(n)][1] / paper[method][str(n)][3] for n in pp_eagle_table.SIZES]
        yield (
            "4.2, Table 2",
            f"{name} lowers the latency of few sequences (1, 2 and 4 stages)",
            f"without drafts it is {joined(stated)} times as long",
            f"without drafts it is {bare(faster[method])} times as long",
            of_all(map(of_ratio, faster[method], stated)),
            f"{conditions()}; {TRAINED}",
        )


def over_none(method: str, stages: int) -> Ratio:
    """How many times as soon a chain's answers are there as those without drafts."""
    found = entries(method, stages)
    return paired(found[PLAIN]["latencies"], found[pp_eagle_table.CHAIN]["latencies"])


def designs() -> Iterator[tuple[str, ...]]:
    """Sections 3.3 and 3.4: rows of a finding."""
    relayed = {place: one["entries"]["auto"] for place, one in figures_of("centralised").items()}
    ratios = {place: Ratio(one["ratio"], one["low"], one["high"], one["pairs"]) for place, one in relayed.items()}
    yield (
        "3.3",
        "stages that talk to each other are faster than an engine that relays every hop",
        "no number",
        "; ".join(f"{said(one)} over {place}" for place, one in ratios.items()),
        of_all(map(of_ratio, ratios.values())),
        "`auto`; in virtual time, emulated, and in processes of one host",
    )
    many = [one for one in figures_of("pp_many") if one["entry"] == pp_eagle_table.CHAIN]
    chains = {(one["drafter"], one["stages"]): one for one in many}
    sizes = [stages for drafter, stages in chains if drafter == "first"]

    def first_over_last(name: str) -> list[float]:
        return [chains["first", n][name] / chains["last", n][name] for n in sizes]

    latencies, rates = first_over_last("latency"), first_over_last("throughput")
    yield (
        "3.4",
        f"a drafter costs less on the last stage than on the first ({listed(sizes)} stages)",
        "no number",
        f"on the first, latency is {joined(latencies)} and throughput {joined(rates)} of that on the last",
        of_cases([one > 1 for one in latencies] + [one < 1 for one in rates]),
        "simulated, no bounds; on the last stage the drafter shares the head's GPU",
    )


def many_sequences(paper: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Throughput of a thousand sequences: rows of a finding."""
    many = {(one["stages"], one["entry"]): one for one in figures_of("pp_many") if one["drafter"] == "last"}
    costs = [many[n, pp_eagle_table.CHAIN]["throughput"] / many[n, PLAIN]["throughput"] for n in pp_many.SIZES]
    stated = [paper["eagle3"][n][2] / paper["none"][n][0] for n in paper["none"]]
    yield (
        "4.2",
        "drafts cost throughput with 1,024 sequences at once",
        f"{ranged(stated)} of none's",
        f"{ranged(costs)} of none's",
        of_cases([one < 1 for one in costs]),
        SIMULATED,
    )
    plain = [row[0] for row in paper["none"].values()]
    gains = [many[n, PLAIN]["throughput"] / many[1, PLAIN]["throughput"] for n in pp_many.SIZES]
    yield (
        "4.2",
        "throughput does not change with the stages",
        f"{ranged(one / plain[0] for one in plain)} of one stage's",
        f"{ranged(gains)} of one stage's",
        of_cases([abs(one - 1) < 0.05 for one in gains[1:]]),
        "simulated; the report's stages waited for each other, ours do not",
    )


def parallel(paper: Table) -> Iterator[tuple[str, ...]]:
    """Table 3: rows of a finding."""
    rows = {(one["model"], f"{one['dp']},{one['pp']},{one['tp']}"): one for one in figures_of("pp_parallel")}
    counts = (2, 4, 8)
    ranks, replicas = [f"1,1,{n}" for n in counts], [f"{n},1,1" for n in counts]

    def row(claim: str, model: str, ways: Sequence[str], base: str, name: str, more: bool) -> tuple[str, ...]:
        """Figures over those of the way ``base``; ``more`` where the report has them above 1."""
        column = ("throughput", "latency").index(name)
        own = [rows[model, way][name] / rows[model, base][name] for way in ways]
        stated = [paper[model][way][column] / paper[model][base][column] for way in ways]
        cases = [(one > 1) == more for one in own]
        verdict = of_sizes(cases, own, stated)
        return "4.3, Table 3", claim, joined(stated), joined(own), verdict, "simulated from prices, no bounds"

    yield row("tensor parallelism adds throughput of the 8B (2, 4, 8 GPUs)", "8B", ranks, "1,1,1", "throughput", True)
    yield row("tensor parallelism costs the 8B latency (2, 4, 8 GPUs)", "8B", ranks, "1,1,1", "latency", True)
    eight = "over eight GPUs the 70B has more throughput with tensor than with pipeline parallelism"
    yield row(eight, "70B", ["1,1,8"], "1,8,1", "throughput", True)
    yield row("replicas of the 8B lose throughput (2, 4, 8)", "8B", replicas, "1,1,1", "throughput", False)
    for model in ("70B", "8B"):
        yield best_way(paper, rows, model, "throughput")
    yield best_way(paper, rows, "70B", "latency")
    yield more_ranks(paper, rows)


def best_way(paper: Table, rows: Rows, model: str, name: str) -> tuple[str, ...]:
    """Whether tensor parallelism over all eight GPUs is the best of all ways that fit."""
    column, sign, words = (0, 1, "highest") if name == "throughput" else (1, -1, "lowest")
    fits = {way: one[name] for (of, way), one in rows.items() if of == model and name in one}
    stated = max(fits, key=lambda way: sign * paper[model][way][column])
    best = max(fits, key=lambda way: sign * fits[way])
    return (
        "4.3, Table 3",
        f"of all ways over up to eight GPUs, tensor parallelism over eight has the {model}'s {words} {name}",
        f"({stated})",
        f"({best})" if best == ALL_RANKS else f"({best}), {fits[best] / fits[ALL_RANKS]:.2f} of that of ({ALL_RANKS})",
        of_cases([best == ALL_RANKS]),
        "simulated from prices, no bounds; ways are dp, pp, tp",
    )


def more_ranks(paper: Table, rows: Rows) -> tuple[str, ...]:
    """Twice as many tensor parallel ranks beside the same replicas and stages."""
    pairs = [(model, way, doubled(way)) for model, way in rows if (model, doubled(way)) in rows]
    stated = [paper[model][more][0] / paper[model][way][0] for model, way, more in pairs]
    own = [rows[model, more]["throughput"] / rows[model, way]["throughput"] for model, way, more in pairs]
    return (
        "4.3, Table 3",
        "twice as many tensor parallel ranks add throughput beside any replicas and stages",
        f"{ranged(stated)}, {counted([one > 1 for one in stated], 'pairs')}",
        f"{ranged(own)}, {counted([one > 1 for one in own], 'pairs')}",
        of_sizes([one > 1 for one in own], own, stated),
        "simulated from prices, no bounds",
    )


def doubled(way: str) -> str:
    dp, pp, tp = way.split(",")
    return f"{dp},{pp},{2 * int(tp)}"


def listed(numbers: Sequence[int]) -> str:
    *first, last = numbers
    return f"{', '.join(map(str, first))} and {last}"


def bare(ratios: Iterable[Ratio]) -> str:
    """Ratios with their bounds, without an x."""
    return ", ".join(said(ratio).replace("x", "") for ratio in ratios)


def joined(values: Iterable[float]) -> str:
    return ", ".join(f"{one:.2f}" for one in values)
