"""PipeDec's findings (Yin et al., 2025, sections 1, 3.3 and 4.3) beside ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from benchmarks.papers import pipedec_seeds
from benchmarks.sections.findings.verdicts import (
    FAILS,
    HOLDS,
    OPEN,
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
NEARLY: Final = 0.02
"""The share of a speed or an accuracy up to which a loss counts as none."""
SLIGHT: Final = 0.05
"""The part of all tokens up to which an accuracy counts as slightly lower; the paper has no number."""


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
    for rows in (pipedec_trees(), accuracies(stages), pipedec_others(), sampled(), throughput()):
        yield from (finding(*cells) for cells in rows)


def run(runs: Any, strategy: str, cluster: int = 1) -> Any:
    """A strategy's figures on one of CLUSTERS, by default that of 14 stages."""
    return find(runs, strategy, CLUSTERS[cluster])


def static(runs: Any) -> Any:
    """The faster of the two static trees."""
    return min((run(runs, name) for name in (STATIC, f"{STATIC}[tree_size=48]")), key=lambda one: one["ms_per_token"])


def pipedec_trees() -> Iterator[tuple[str, ...]]:
    """Figure 4: rows of a finding."""
    runs_of = figures_of("pipedec_tree")
    best, widths, rises, more, levels = [], [], [], [], []
    for name, runs in runs_of.items():
        fastest = min(runs, key=lambda one: one["ms_per_token"])["settings"]
        best.append(f"{fastest['width']} wide, {fastest['children']} children ({DRAFTS[name]})")
        cells = {(one["settings"]["width"], one["settings"]["children"]): one for one in runs}
        wide, many = (sorted({cell[place] for cell in cells}) for place in (0, 1))
        widths.append(wide[0] < fastest["width"] < wide[-1])
        rises += [cells[wide[-1], each]["hit_rate"] > cells[wide[0], each]["hit_rate"] for each in many]
        for width in wide:
            first, second, *_, last = (cells[width, each]["ms_per_token"] for each in many)
            more.append(last < first)
            levels.append(first - second > second - last)
    how = "simulated, no bounds"
    yield (
        "4.3.1, Fig. 4",
        "latency falls with the tree's width, then rises",
        "best at 32 wide, 16 children",
        f"best at {' and '.join(best)}",
        of_cases(widths),
        how,
    )
    yield (
        "4.3.1, Fig. 4",
        "accuracy rises with the width",
        "no number",
        f"the widest tree is right more often than the narrowest {counted(rises, 'columns')}",
        of_cases(rises),
        how,
    )
    yield (
        "4.3.1, Fig. 4",
        "more children lower the latency, with gains that level off",
        "no number",
        f"{many[-1]} children are faster than {many[0]} {counted(more, 'rows')}, and the step from {many[0]} to "
        f"{many[1]} gains more than all others {counted(levels, 'rows')}",
        of_cases([*more, *levels]),
        how,
    )


def accuracies(stages: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Figure 6: rows of a finding. The static tree is the faster one, as everywhere here."""
    pairs = {name: (run(runs, "pipedec")["hit_rate"], static(runs)["hit_rate"]) for name, runs in stages.items()}
    yield (
        "4.3.2, Fig. 6",
        "more tokens are predicted right than with a static tree (14 stages)",
        "no number",
        "; ".join(f"{percent(one)} and {percent(other)} {DRAFTS[name]}" for name, (one, other) in pairs.items()),
        of_cases([one > other for one, other in pairs.values()]),
        "simulated, no bounds",
    )
    deep = {
        name: [run(runs, "pipedec", at)["hit_rate"] for at in range(len(CLUSTERS))] for name, runs in stages.items()
    }
    yield (
        "4.3.2, 6",
        "accuracy stays high as the tree gets deeper (7, 14 and 21 stages)",
        "no number",
        "; ".join(f"{', '.join(map(percent, found))} {DRAFTS[name]}" for name, found in deep.items()),
        of_cases([found[-1] > found[0] - NEARLY for found in deep.values()]),
        "simulated, no bounds",
    )


def pipedec_others() -> Iterator[tuple[str, ...]]:
    """Figure 3: a row of a finding."""
    text = figures_of("long_text")
    yield (
        "3.3, Fig. 3",
        "the best 8 candidates of the draft model nearly always hold the target's token",
        "accuracy near 1",
        f"{percent(text['long']['8'])} of {text['tokens']:,} tokens",
        OTHER,
        "another pair of models, which reads windows of 512 tokens",
    )


def sampled() -> Iterator[tuple[str, ...]]:
    """Figure 7: rows of a finding."""
    found = figures_of(pipedec_seeds.NAME)[pipedec_seeds.CLUSTER]
    own, beside = pipedec_seeds.sampled_over_greedy(found["pipedec"]), pipedec_seeds.beside_static(found)
    greedy, warm = accuracies_of(found["pipedec"])
    before, after = accuracies_of(found[pipedec_seeds.STRATEGIES[1]])
    how = f"in virtual time, {pipedec_seeds.SEEDS} seeds"
    yield (
        "4.3.3, Fig. 7",
        "sampling costs little latency",
        "no number, five runs",
        f"a token takes {said(own)} as long; over the same texts at T = 1, simulated, {same_texts()}",
        of_bounds(own, 1 + NEARLY),
        how,
    )
    yield (
        "4.3.3, Fig. 7",
        "sampling lowers accuracy slightly",
        "no number, five runs",
        f"{percent(warm)} for {percent(greedy)}",
        of_cases([greedy - SLIGHT < warm < greedy]),
        f"{how}, no bounds",
    )
    yield (
        "4.3.3, Fig. 7",
        "sampling costs a static tree more",
        "no number, five runs",
        f"sampled over greedy, PipeDec's time per token is {said(beside)} the static tree's; its accuracy falls by "
        f"{100 * (greedy - warm):.1f} points, the tree's by {100 * (before - after):.1f}",
        of_bounds(beside, 1),
        how,
    )


def same_texts() -> str:
    """How many times as long a sampled token takes as a greedy one, candidates ranked with the target's noise."""
    mean, low, high = figures_of("same_texts")["clusters"][CLUSTERS[1]]["pipedec"]
    return f"{times(1 / mean)} ({1 / high:.2f} to {1 / low:.2f})"


def accuracies_of(way: Mapping[str, Any]) -> Iterator[float]:
    """Greedy and sampled."""
    return (way[name]["accuracy"] for name in pipedec_seeds.TEMPERATURES)


def of_bounds(ratio: Ratio, most: float) -> str:
    """The verdict on "no more than ``most`` times"."""
    low, high = ratio.bounds or (ratio.mean, ratio.mean)
    return HOLDS if high <= most else FAILS if low > most else OPEN


def throughput() -> Iterator[tuple[str, ...]]:
    """Figure 8: rows of a finding."""
    rows = {
        (one["strategy"], one["how"]): one["over_pipedec"]
        for one in figures_of("pipedec_throughput")["rows"]
        if one["at_once"] == 8
    }

    def rates(strategy: str) -> str:
        found = []
        for how, words in {"together": "in one batch", "apart": "each as it is ready"}.items():
            rate = rows[strategy, how]
            found.append(f"{rate['mean']:.2f}x ({rate['low']:.2f} to {rate['high']:.2f}) {words}")
        return " and ".join(found)

    tree = f"{STATIC}[tree_size=48]"
    yield (
        "4.3.4, Fig. 8",
        "with eight requests at once its throughput is like the static tree's",
        "no number",
        f"the tree has {rates(tree)}",
        OTHER,
        "the paper does not say whether its batches follow one another",
    )
    yield (
        "4.3.4",
        "with more memory the plain pipeline and the static tree would overtake it (expected, not measured there)",
        "no number",
        f"the plain pipeline has {rates(PLAIN)}, the tree {rates(tree)}",
        of_all(of_ratio(Ratio(**rows[one, how])) for one in (PLAIN, tree) for how in ("together", "apart")),
        "simulated, eight requests",
    )
