"""Strategies and drafters: `auto` beside all others, what a wrong drafter costs, acceptance rules, drafters' time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean, geometric_mean
from typing import Any, Final

from benchmarks.drafters import ablations, like_for_like, pipelines
from benchmarks.papers import six_sets
from benchmarks.sections.base import Section, by_script
from benchmarks.shared.commands import with_json_output
from benchmarks.shared.measured import Taken, stored
from benchmarks.shared.root import ROOT
from benchmarks.shared.simulations import LABELS, SAMPLINGS, recording, said
from benchmarks.strategies import always_wrong, same_texts
from penstock.lab.acceptance import LABELS as RULES
from penstock.lab.grid import PLAIN
from penstock.lab.report import times
from penstock.lab.trainer.options import IN_FLIGHT

LEAST = 10
"""Cases of a table, those of the lowest ratios."""


def never_slower_values(figures: Mapping[str, Mapping[str, float]]) -> Mapping[str, Any]:
    """The cases' mean, and those where ``auto`` is slowest beside the better of always and never speculating."""
    ordered = sorted(figures.items(), key=lambda case: case[1]["ratio"])
    return {
        "mean": geometric_mean([one["ratio"] for one in figures.values()]),
        "over_plain": geometric_mean([one["over_plain"] for one in figures.values()]),
        "low": sum(one["ratio"] < 0.98 for one in figures.values()),
        "least_over_plain": min(one["over_plain"] for one in figures.values()),
        "four_wrong": figures["2 stages, dear rows, one core, wrong, 4 together"],
        "rows": [
            [
                name,
                *(f"{one[key]:.3f}" for key in ("ratio", "over_plain", "always")),
                f"{one['lost']:.1f}",
                f"{one['tokens']:.0f}",
            ]
            for name, one in ordered[:LEAST]
        ],
    }


def take_acceptance() -> Taken:
    command, content = with_json_output(["acceptance", *(recording(name) for name in SAMPLINGS)])
    recordings = zip(SAMPLINGS, content["recordings"], strict=True)
    return [command], {name: accepted(one) for name, one in recordings}


def accepted(recorded: Mapping[str, Any]) -> Mapping[str, Any]:
    """The figures of a recording that are stored: its size, and shares by rule and number of candidates."""
    rules = {
        rule: {k: round(figure["value"], 4) for k, figure in shares.items()}
        for rule, shares in recorded["rules"].items()
    }
    return {**{part: recorded[part] for part in ("tokens", "requests", "looping")}, "rules": rules}


def take_same_texts() -> Taken:
    (figures,) = same_texts.measured([str(ROOT / recording("T1"))]).values()
    return ["python -m benchmarks.strategies.same_texts"], figures


def time_values(figures: Any) -> Mapping[str, Any]:
    """Each drafter's figures in the order of the columns."""
    widths = {key: row["widths"] for key, row in figures.items()}
    return {"cells": {key: [one[w][t] for w in ("W=1", "W=4") for t in ("T=0", "T=1")] for key, one in widths.items()}}


def six_sets_values(figures: Any) -> Mapping[str, Any]:
    """A row for each entry of a cluster, drafter and temperature: all sets together, then each."""
    cases: dict[tuple[str, str, float], list[Any]] = {}
    for one in figures.values():
        cases.setdefault((one["cluster"], one["method"], one["temperature"]), []).append(one)

    def cell(rows: Sequence[Any], entry: str, base: str) -> str:
        if not rows:
            return "-"
        ratio = six_sets.speed_up(rows, entry, base)
        return said(ratio) if ratio.bounds else times(ratio.mean)

    size = next(one for one in figures.values() if one["method"] == six_sets.LOOKUP)

    def drafted(method: str, one: Any) -> str:
        """The method, and how much was asked where that is another size than the page states."""
        fewer = (one["prompts"], one["tokens"]) != (size["prompts"], size["tokens"])
        return f"`{method}`" + (f" ({one['prompts']} of {one['tokens']} tokens)" if fewer else "")

    rows = []
    for (cluster, method, temperature), some in cases.items():
        base = six_sets.BASES[cluster]
        for entry in [name for name in some[0]["entries"] if name not in (base, PLAIN)]:
            by_set = [cell([one for one in some if one["set"] == name], entry, base) for name in six_sets.SETS]
            seeds = Counter(one["set"] for one in some).values()
            least, most = min(seeds), max(seeds)
            counted = f" ({least} to {most} seeds)" if least < most else f" ({most} seeds)" if most > 1 else ""
            sampled = f"{temperature:g}{counted}"
            label = [f"`{cluster}`", drafted(method, some[0]), sampled, f"`{entry}`"]
            rows.append([*label, cell(some, entry, base), *by_set])
    computed = [one for one in figures.values() if not one["replayed"]]
    same = all(entry["identical"] for one in computed for entry in one["entries"].values())
    return {
        "size": size,
        "sampled": any(temperature for _, _, temperature in cases),
        "learned": [
            f"`{method}`" for method in dict.fromkeys(method for _, method, _ in cases) if method != six_sets.LOOKUP
        ],
        "replayed": len(figures) - len(computed),
        "cases": len(figures),
        "headings": ["cluster", "drafts", "T", "strategy", "all sets", *six_sets.SETS],
        "rows": rows,
        "same": "All" if same else "NOT all",
    }


RATE_GAIN: Final = 1.0
"""Points by which a drafter has to be right more often at another learning rate for the page to say so; seeds differ by
as much."""


def like_for_like_values(figures: Any) -> Mapping[str, Any]:
    """Rows of both tables, for the runs with the most updates."""
    updates = max(updates_of(case) for case in figures)
    runs: dict[str, list[Any]] = {}
    for case, one in figures.items():
        if updates_of(case) == updates:
            runs.setdefault(case.partition(",")[0], []).append(one)
    known = []
    for name, some in runs.items():
        places = [spread([100 * one["in_flight"][place][0] for one in some], ".0f") for place in range(IN_FLIGHT + 1)]
        minutes = f"{fmean(one['processor_s'] for one in some) / 60:.0f}"
        known.append([f"`{name}`", *places, minutes, f"{some[0]['bytes'] / 1e6:.1f}"])
    sizes = [f"{size} nodes, T = {at}" for at in (0, 1) for size in like_for_like.TREES[::2]]
    trees = [
        [said.format(name)]
        + [
            spread([one[way][f"T={at}"][i] for one in some], ".2f")
            for at in (0, 1)
            for i in range(0, len(like_for_like.TREES), 2)
        ]
        for name, some in runs.items()
        for way, said in (("trees", "`{}`"), ("by_level", "`{}`, a pass a level"))
        if way in some[0]
    ]
    hours = sum(one["processor_s"] for some in runs.values() for one in some) / 3600
    seeds = " or ".join(map(str, sorted({len(some) for some in runs.values()})))
    return {"updates": updates, "seeds": seeds, "known": known, "sizes": sizes, "trees": trees, "hours": hours}


def ablations_values(figures: Any) -> Mapping[str, Any]:
    """A row for each drafter and kind of pipeline: the whole, the drafters of ``like_for_like`` that have less, and
    the others."""
    updates = max(updates_of(case) for case in figures)
    alike, figures = (
        {case: one for case, one in some.items() if updates_of(case) == updates}
        for some in (stored(like_for_like.__name__.rpartition(".")[2]).figures, figures)
    )
    whole = of_cases(figures, ablations.WHOLE)
    rows = [
        [f"{ablations.WHOLE}, {stages}", *shares([one[stages] for one in whole])]
        for stages in ablations.STAGES
        if stages in whole[0]
    ]
    less = {"no states (`shown dspark`)": "shown dspark", "no states, no Markov head (`shown dflash`)": "shown dflash"}
    rows += [[said, *shares([one["in_flight"] for one in of_cases(alike, name)])] for said, name in less.items()]
    others = (name for name in ablations.CASES if name != ablations.WHOLE and of_cases(figures, name))
    rows += [[name, *shares([one["filled"] for one in of_cases(figures, name)])] for name in others]
    return {"rows": rows, "seeds": len(whole), "updates": updates}


def rates_values(figures: Any) -> Mapping[str, Any]:
    """A row for each drafter and learning rate, its recipe's first; how much the best other rate gains, in words."""
    name = next(iter(figures))
    updates, seed = updates_of(name), int(name.rpartition(" ")[2])
    alike = stored(like_for_like.__name__.rpartition(".")[2]).figures
    rows, gains = [], {}
    for name, (_, options) in like_for_like.RECIPES.items():
        own = alike[f"{name}, {updates} updates, seed {seed}"]
        others = [one for one in figures.values() if one["name"] == name and one["rate"] != options["learning_rate"]]
        rates = [("the tables'", options["learning_rate"], own), *(("", one["rate"], one) for one in others)]
        rows += [[f"`{name}`", which, f"{rate:g}", *shares([one["in_flight"]])] for which, rate, one in rates]
        if others:
            gains[name] = 100 * (max(one["in_flight"][0][0] for one in others) - own["in_flight"][0][0])
    more = [f"`{name}` {gain:.1f}" for name, gain in gains.items() if gain >= RATE_GAIN]
    return {"rows": rows, "updates": updates, "more": more, "gain": RATE_GAIN}


def passes_values(figures: Any) -> Mapping[str, Any]:
    rows = [
        [f"`{name}`", f"{one['pass_ms']:.2f}", f"{one['passes']:g}", f"{one['refill_ms']:.1f}"]
        for name, one in figures.items()
    ]
    return {"rows": rows, "size": next(iter(figures.values()))}


def of_cases(figures: Mapping[str, Any], name: str) -> list[Any]:
    """The figures of a drafter from all seeds."""
    return [one for case, one in figures.items() if case.rpartition(", seed")[0].rpartition(", ")[0] == name]


def shares(runs: Sequence[Sequence[Sequence[float]]]) -> list[str]:
    """Percent of tokens that were the best candidate, by how many are in flight, and the mean among the best 4."""
    best = [spread([100 * run[place][0] for run in runs], ".1f") for place in range(IN_FLIGHT + 1)]
    return [*best, f"{100 * fmean(share[1] for run in runs for share in run):.1f}"]


def pipelines_values(figures: Any) -> Mapping[str, Any]:
    """A row for each drafter, with `auto` and the chain by turns over plain decoding on every stored cluster; the same
    of those that are emulated."""
    every = list(dict.fromkeys(case.split("; ")[0] for case in figures))
    emulated = [place for place in every if place.endswith(pipelines.EMULATION)]
    virtual = [place for place in every if place not in emulated]

    def row(name: str, places: Sequence[str]) -> list[str]:
        speeds = []
        for place in places:
            if one := figures.get(f"{place}; {name}"):
                chain, auto = one["over_plain"].values()
                speeds.append("{:.2f} ({:.2f} to {:.2f}); {:.2f}".format(*auto, chain[0]))
            else:
                speeds.append("-")
        return [f"`{name}`", *speeds]

    return {
        "places": [f"{place}, {stages_of(figures, place)} stages" for place in virtual],
        "rows": [row(name, virtual) for name in like_for_like.RECIPES],
        "emulated": emulated,
        "late": f"{100 * max(one.get('overruns', 0) for one in figures.values()):.0f}% or less",
        "emulated_rows": [row(name, emulated) for name in pipelines.EMULATED_WITH] if emulated else [],
        "size": next(iter(figures.values())),
        "same": "All" if all(one["identical"] for one in figures.values()) else "NOT all",
    }


def stages_of(figures: Mapping[str, Any], place: str) -> int:
    return next(int(one["stages"]) for case, one in figures.items() if case.split("; ")[0] == place)


def updates_of(case: str) -> int:
    """1000 for ``shown dflash, 1000 updates, seed 0``."""
    return int(case.rpartition(" updates")[0].rpartition(", ")[2])


def spread(values: Sequence[float], form: str) -> str:
    """Mean, and least and greatest of several."""
    mean = format(fmean(values), form)
    return f"{mean} ({min(values):{form}} to {max(values):{form}})" if len(values) > 1 else mean


def in_flight_values(figures: Any) -> Mapping[str, Any]:
    shares = []
    for name, one in figures["drafters"].items():
        shares.append([f"{name}, in chains as published", *(f"{share:.2f}" for share in one["in_chains"])])
        shares.append([f"{name}, in the script's chains", *(f"{share:.2f}" for share in one["fitted"])])
        shares.append([f"{name}, of all tokens", *(f"{share:.2f}" for share in one["of_all"])])
    return {"shares": shares, "rows": [in_flight_row(row) for row in figures["rows"]]}


def in_flight_row(row: Mapping[str, Any]) -> list[str]:
    chain, auto = row["over_plain"].values()
    speeds = ["{:.2f} ({:.2f} to {:.2f})".format(*one) for one in (chain, auto)]
    shown = "shown" if row["shown"] else "not shown"
    return [row["cluster"], str(row["stages"]), row["drafter"], shown, *speeds, f"{auto[0] / chain[0]:.2f}"]


SECTIONS = {
    "like_for_like": Section(values=like_for_like_values),
    "rates": Section(values=rates_values),
    "passes": Section(values=passes_values),
    "ablations": Section(values=ablations_values),
    "in_flight": Section(values=in_flight_values),
    "pipelines": Section(values=pipelines_values),
    "six_sets": Section(values=six_sets_values),
    "always_wrong": by_script(always_wrong),
    "never_slower": Section(values=never_slower_values),
    "same_texts": Section(how="Simulated, from a recording of the demo pair", take=take_same_texts),
    "acceptance": Section(
        how="Computed from recordings of the demo pair",
        take=take_acceptance,
        values=lambda figures: {"labels": LABELS, "rules": RULES},
    ),
    "drafter_time": Section(values=time_values),
}
