"""PipeDec's findings (Yin et al., 2025, sections 1, 3.3 and 4.3) beside ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

from benchmarks.sections.findings.verdicts import (
    OTHER,
    SIMULATED,
    Finding,
    counted,
    figures_of,
    of_all,
    of_cases,
    of_ratio,
)
from benchmarks.sections.pipedec import CLUSTERS, STATIC, small_model_seconds
from benchmarks.shared.published import published
from benchmarks.shared.simulations import find, over, percent, said
from penstock.lab.grid import PLAIN
from penstock.lab.report import Ratio, times

DRAFTS: Final = {"T0": "demo pair", "profile": "synthetic profile"}
PAPER: Final = "PipeDec"


def findings() -> Iterator[Finding]:
    paper, stages = published("pipedec")["over"], figures_of("pipedec_stages")

    def finding(place: str, claim: str, stated: str, ours: str, verdict: str, how: str = SIMULATED) -> Finding:
        return Finding(paper=PAPER, place=place, claim=claim, stated=stated, ours=ours, verdict=verdict, how=how)

    def decided(place: str, claim: str, stated: str, least: float, ratio: Callable[[Any], Ratio]) -> Finding:
        found = {name: ratio(runs) for name, runs in stages.items()}
        ours = "; ".join(f"{said(one)} {DRAFTS[name]}" for name, one in found.items())
        return finding(place, claim, stated, ours, of_all(of_ratio(one, least) for one in found.values()))

    def stated(name: str) -> str:
        mean, low, high = paper[name]
        return f"{mean:.2f}x ({low:g} to {high:g})"

    plain, trees = paper["plain"], paper["static"]
    yield decided(
        "1, 4.3.2",
        "faster than the plain pipeline at 14 stages",
        stated("plain"),
        plain[1],
        lambda runs: over(run(runs, "pipedec"), run(runs, PLAIN)),
    )
    yield decided(
        "1, 4.3.2",
        "faster than a static tree at 14 stages",
        stated("static"),
        trees[1],
        lambda runs: over(run(runs, "pipedec"), static(runs)),
    )
    yield decided(
        "4.3.2",
        "14 stages are faster than 7",
        f"nearly {paper['seven']:.2f}x",
        paper["seven"],
        lambda runs: over(run(runs, "pipedec"), run(runs, "pipedec", 0)),
    )
    more = {name: over(run(runs, "pipedec", 2), run(runs, "pipedec")) for name, runs in stages.items()}
    seven = {name: over(run(runs, "pipedec"), run(runs, "pipedec", 0)) for name, runs in stages.items()}
    levels = [(more[name].high or 0) < (seven[name].low or 0) for name in stages]
    gained = "; ".join(f"{said(one)} {DRAFTS[name]}" for name, one in more.items())
    yield finding("4.3.2", "gains level off from 14 stages to 21", "no number", gained, of_cases(levels))
    small = [run(runs, "pipedec")["ms_per_token"] / (1e3 * small_model_seconds()) for runs in stages.values()]
    yield finding(
        "4.3.2",
        "as fast as an 8B model alone on one GPU, or faster",
        "for some tasks",
        f"the 8B is {' and '.join(map(times, small))} as fast",
        of_cases([one <= 1 for one in small]),
        "simulated; the 8B is reckoned from its GPU's bandwidth",
    )
    yield from (finding(*cells) for cells in pipedec_trees())
    yield from (finding(*cells) for cells in pipedec_others())


def run(runs: Any, strategy: str, cluster: int = 1) -> Any:
    """A strategy's figures on one of CLUSTERS, by default that of 14 stages."""
    return find(runs, strategy, CLUSTERS[cluster])


def static(runs: Any) -> Any:
    """The faster of the two static trees."""
    return min((run(runs, name) for name in (STATIC, f"{STATIC}[tree_size=48]")), key=lambda one: one["ms_per_token"])


def pipedec_trees() -> Iterator[tuple[str, ...]]:
    """Figure 4: rows of a finding."""
    runs_of = figures_of("pipedec_tree")
    widths, best = [], []
    for name, runs in runs_of.items():
        fastest = min(runs, key=lambda one: one["ms_per_token"])["settings"]
        sizes = sorted({one["settings"]["width"] for one in runs})
        widths.append(sizes[0] < fastest["width"] < sizes[-1])
        best.append(f"{fastest['width']} wide, {fastest['children']} children ({DRAFTS[name]})")
    rises = []
    for runs in runs_of.values():
        for children in sorted({one["settings"]["children"] for one in runs}):
            column = [one for one in runs if one["settings"]["children"] == children]
            rates = [one["hit_rate"] for one in sorted(column, key=lambda one: one["settings"]["width"])]
            rises.append(rates[-1] > rates[0])
    yield (
        "4.3.1, Fig. 4",
        "latency falls with the tree's width, then rises",
        "best at 32 wide, 16 children",
        f"best at {' and '.join(best)}",
        of_cases(widths),
        "simulated, no bounds",
    )
    yield (
        "4.3.1, Fig. 4",
        "accuracy rises with the width",
        "no number",
        f"the widest tree is right more often than the narrowest {counted(rises, 'columns')}",
        of_cases(rises),
        "simulated, no bounds",
    )


def pipedec_others() -> Iterator[tuple[str, ...]]:
    """Figures 3, 7 and 8: rows of a finding."""
    text, pair = figures_of("long_text"), figures_of("pipedec_demo_pair")
    yield (
        "3.3, Fig. 3",
        "the best 8 candidates of the draft model nearly always hold the target's token",
        "accuracy near 1",
        f"{percent(text['long']['8'])} of {text['tokens']:,} tokens",
        OTHER,
        "another pair of models, which reads windows of 512 tokens",
    )
    greedy, warm = (find(pair[name], "pipedec") for name in ("T0", "T0.6"))
    yield (
        "4.3.3, Fig. 7",
        "sampling costs little latency and little accuracy",
        "no number, five runs",
        f"{warm['ms_per_token'] / greedy['ms_per_token']:.2f} of the greedy time, accuracy "
        f"{percent(warm['hit_rate'])} for {percent(greedy['hit_rate'])}",
        OTHER,
        "one seed, and other texts at each temperature",
    )
    rows = {
        (one["strategy"], one["how"]): one for one in figures_of("pipedec_throughput")["rows"] if one["at_once"] == 8
    }
    ways = {"together": "in one batch", "apart": "each as it is ready"}
    found = []
    for how, words in ways.items():
        rate = rows[f"{STATIC}[tree_size=48]", how]["over_pipedec"]
        found.append(f"{rate['mean']:.2f}x ({rate['low']:.2f} to {rate['high']:.2f}) {words}")
    yield (
        "4.3.4, Fig. 8",
        "with eight requests at once its throughput is like the static tree's",
        "no number",
        f"the tree has {' and '.join(found)}",
        OTHER,
        "the paper does not say whether its batches follow one another",
    )
