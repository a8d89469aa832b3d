"""docs/background/papers.md: the figures in it, from what is stored, and each paper's findings beside ours."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import geometric_mean
from typing import Any

from benchmarks.drafters import halfway
from benchmarks.papers import jupiter, pp_parallel
from benchmarks.sections.findings import BY_PAPER, of_paper
from benchmarks.sections.findings.spd import falls, lengths
from benchmarks.sections.findings.verdicts import VERDICTS, Finding, ranged
from benchmarks.sections.jupiter import published_seconds, total
from benchmarks.sections.pipedec import groups_values
from benchmarks.sections.spd import CELLS, GOAL, again_for, halfway_values, simulated_rows
from benchmarks.shared.measured import path_of, stored
from benchmarks.shared.published import published
from benchmarks.shared.simulations import find
from penstock.lab.report import markdown

STEP = "spd-8"
"""The preset whose corrections the page speaks of."""


def figures_of(name: str) -> Any:
    return stored(name).figures


def percent(value: float, digits: int = 1) -> str:
    return f"{100 * value:.{digits}f}%"


def listed(words: Iterable[str]) -> str:
    """``a, b and c``."""
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last


def found_by(paper: str) -> str:
    """A paper's findings as a table."""
    rows = [[one.place, one.claim, one.stated, one.ours, f"**{one.verdict}**", one.how] for one in of_paper(paper)]
    return to_the_left(["section", "it finds", "its figure", "ours", "so", "ours are"], rows)


def by_verdict(found: Sequence[Finding]) -> Mapping[str, str]:
    """All findings as a table for each verdict that occurs."""
    tables = {}
    for verdict in VERDICTS:
        rows = [
            [one.paper, one.place, one.claim, one.stated, one.ours, one.how] for one in found if one.verdict == verdict
        ]
        if rows:
            tables[verdict] = to_the_left(["paper", "section", "it finds", "its figure", "ours", "ours are"], rows)
    return tables


def to_the_left(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of words, whose columns begin at the left."""
    return markdown(headings, rows).replace("---:", "---")


def departures(way: str) -> str:
    """How much longer `pipedec` takes the other way, by cluster."""
    return listed(percent(one[way][0] - 1) for one in figures_of("pipedec_departures"))


def noise() -> Mapping[str, float]:
    """The share that shared noise costs SPD in a chain over eight stages, of L' and of its fall from T = 0 to T = 1."""
    rules = figures_of("spd_rejection")["spd n=8 Ls=4"]
    longer = rules["rejection"]["length"] / rules["shared noise"]["length"] - 1
    cells = figures_of("spd_tables")["spd n=8 Ls=4"]["cells"]
    greedy, sampled = (cells[f"T={at} W=1"]["length"] for at in (0, 1))
    return {"of_length": longer, "of_fall": sampled * longer / (greedy - sampled)}


def corrections() -> Mapping[str, Any]:
    """In-flight correction: the ratio on STEP at T = 1, those of all settings, and what would be needed."""
    table = figures_of("spd_correction")
    every = [one for row in table.values() for one in row["temperatures"].values()]
    decided = [one for one in every if one["bounds"][0] > 1 or one["bounds"][1] < 1]
    here = table[STEP]["temperatures"]["T=1"]
    bound = simulated_rows()[-1][1][0]
    rest = ranged(one["ratio"] for one in every if one is not here)
    half = halfway_values(figures_of(halfway.__name__.rpartition(".")[2]))
    learned = figures_of("halfway")["curve"][-1]["learned"]
    return {
        "here": here,
        "settings": len(every),
        "decided": len(decided),
        "rest": rest,
        "bound": bound,
        "goal": GOAL,
        "needed": again_for(GOAL),
        "half": half,
        "learned": learned,
    }


def variants(stages: int) -> str:
    """How much longer or shorter L' is with a module for one n than with one for all."""
    recipes = figures_of("spd_recipes")
    own, every = (recipes[f"{name} n={stages}"]["lengths"] for name in (f"paper-{stages}", "anchors"))
    more = [100 * (own[cell] / every[cell] - 1) for cell in CELLS]
    if min(more) < 0 < max(more):
        return f"between {-min(more):.0f}% shorter and {max(more):.0f}% longer"
    return f"{ranged(map(abs, more), '.0f')}% {'longer' if more[0] > 0 else 'shorter'}"


def stand_in(name: str) -> str:
    """How many times the published seconds of Table IV a stand-in for Jupiter takes, over all settings."""
    found = [
        total(one["pipelines"][name]) / published_seconds(one, "Jupiter") for one in figures_of("jupiter")["settings"]
    ]
    return f"{geometric_mean(found):.2f} ({ranged(found)})"


def eight_stages() -> Mapping[str, Any]:
    """Ours at eight stages beside SpecPipe: one request with the synthetic profile, and many sequences."""
    against = figures_of("auto_against")
    many = {one["entry"]: one for one in figures_of("pp_many") if one["stages"] == 8 and one["drafter"] == "last"}
    auto, plain = many["auto"], many["autoregressive"]
    return {
        "paper": published("pipedec")["specpipe"],
        "over_plain": {name: against[name]["over_plain"] for name in ("two-servers", "spd-8")},
        "throughput": auto["throughput"] / plain["throughput"],
        "latency": plain["latency"] / auto["latency"],
    }


def continuous_over_flowspec() -> str:
    """How many times as fast, over 14 stages, by temperature."""
    pair = figures_of("pipedec_demo_pair")
    return ranged(
        (find(runs, "flowspec")["ms_per_token"] / find(runs, "continuous")["ms_per_token"] for runs in pair.values()),
        ".1f",
    )


def values() -> Mapping[str, Any]:
    fall, eagle = falls(lengths()[1])
    chats = next(iter(figures_of("spd_chats").values()))
    return {
        "figures_of": figures_of,
        "percent": percent,
        "found_by": found_by,
        "papers": [*BY_PAPER],
        "departures": departures,
        "groups": groups_values(figures_of("tensor_groups"))["ratio"]("7 x 2 in sequence", "auto"),
        "exclusive": {
            one["cluster"]: one["exclusive"][0] - 1 for one in figures_of("pipedec_transfers") if not one["gbit_s"]
        },
        "most_exclusive": max(one["exclusive"][0] - 1 for one in figures_of("pipedec_transfers")),
        "deciding": next(one for one in figures_of("decisions")["runs"] if one["strategy"] == "pipedec"),
        "relayed": figures_of("centralised")["14 boards, in virtual time"]["entries"]["auto"],
        "emulated": figures_of("centralised")["14 boards, emulated"]["entries"]["auto"],
        "kinds": ranged(one["ratio"] for one in figures_of("layer_kinds") if "ratio" in one),
        "text": figures_of("long_text"),
        "sets_measured": path_of("six_sets").exists(),
        "most_tokens": max(one["tokens"] for one in figures_of("spd_tables").values()),
        "table_3_tokens": pp_parallel.TOKENS_FOR_THROUGHPUT,
        "first_right": percent(jupiter.FIRST_RIGHT, 0),
        "heads": jupiter.HEADS,
        "stand_in": stand_in,
        "variants": variants,
        "rules": figures_of("spd_rejection"),
        "noise": noise(),
        "falls": ranged((100 * one for one in fall), ".0f"),
        "eagle_falls": percent(eagle, 0),
        "corrections": corrections(),
        "eight": eight_stages(),
        "over_flowspec": continuous_over_flowspec(),
        "chats": chats,
        "eagle_table": next(iter(figures_of("pp_eagle_table").values())),
    }
