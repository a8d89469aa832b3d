"""Jupiter's paper: its tables and figures beside ours, plans, prompts and answers in pieces."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import fmean, geometric_mean, median
from typing import Any

from benchmarks.papers import exchanged, jupiter
from benchmarks.papers.jupiter import IN_TABLE_5
from benchmarks.sections.base import Section, by_script
from benchmarks.shared.points import ASKING, TITLE
from benchmarks.shared.published import published
from benchmarks.strategies import planned_hosts, plans
from penstock.lab.plan import METHODS
from penstock.lab.plan_choices import EVEN, JUPITER, PROPORTIONAL
from penstock.lab.report import times
from penstock.outlines.steps import KINDS

PAPER = published("jupiter")
WAYS = ("chain", "outlines", "both", "auto", "both, auto")
GOAL = 0.85
"""Fraction of N times one stage's speed that is aimed at."""
PUBLISHED = (*METHODS, "EdgeShard", "Jupiter")
COLUMNS = (*PUBLISHED, "Penstock")

# ----------------------------------------------------------------------------------------------------------- the tables


def values(figures: Any) -> Mapping[str, Any]:
    settings, answers, stages = figures["settings"], figures["answers"], figures["stages"]
    ways = [way.replace("auto", "`auto`") for way in WAYS]
    below = [one for one in stages if one["speedup"] < GOAL * one["stages"]]
    of_7b = [one for one in answers if one["model"] == "7B"]
    (in_table,) = (one for one in of_7b if is_table_5(one))

    def longer(name: str, *phases_s: str) -> str:
        """Ranges of times over Jupiter's and over ours."""
        ways = (("Jupiter", "formula"), ("Jupiter", "rings"), ("Penstock", "rings"))
        found = [sorted(times_as_long(figures[name], phases_s, *way)) for way in ways]
        return " | ".join(f"{one[0]:.1f} to {one[-1]:.1f}" for one in found)

    def outline_share(way: str) -> str:
        return f"{100 * in_table['outline_s'][way] / in_table['seconds'][way]:.0f}"

    return {
        "methods": [*METHODS],
        "columns": [*COLUMNS],
        "exchanging": [exchanging(one) for one in settings if one["environment"] == "A"],
        "totals": [totals(one) for one in settings],
        "phases": [phases(one) for one in settings if one["model"] == "7B"],
        "boards": [
            [f"{one['boards']} NX, {one['rate']}", *(ours(one, name, ["rings"]) for name in COLUMNS)]
            for one in figures["boards"]
        ],
        "longer": longer,
        "ways": ways,
        "ours_headings": [f"ours: {way}" for way in ways],
        "table_5": [
            [one["model"], *map("{:.1f}x".format, PAPER["table_5"][one["model"]]), *(gain(one, way) for way in WAYS)]
            for one in answers
            if is_table_5(one)
        ],
        "title_tokens": TITLE,
        "asking_tokens": ASKING,
        "shapes": [[f"{one['points']} of {one['tokens']} tokens", *(gain(one, way) for way in WAYS)] for one in of_7b],
        "outline_share": outline_share,
        "most": max(of_7b, key=lambda one: (one["points"], one["tokens"])),
        "gain": gain,
        "worst": max(one["planned_s"] / min(one["fixed_s"].values()) for one in figures["prompts"]),
        "below": below,
        "least_share": min(one["speedup"] / one["stages"] for one in stages if one not in below),
        "slower": [one["speedup"] / one["of_8"] for one in stages],
    }


def exchanging(one: Mapping[str, Any]) -> list[str]:
    """A row of Table II."""
    paper = PAPER["table_2"][one["model"]].get(one["rate"], (None,) * len(METHODS))
    row = [f"{one['model']}, {one['rate']}"]
    for name, stated in zip(METHODS, paper, strict=True):
        both = [one["baselines"][name][counted]["ratio"] for counted in ("formula", "rings")]
        row.append(" / ".join(["-" if stated is None else f"{stated:.2f}", *(f"{x:.2f}" for x in both)]))
    return row


def totals(one: Mapping[str, Any]) -> list[str]:
    """A row of Table IV."""
    paper = PAPER["table_4"][one["environment"]][one["model"]][one["rate"]]
    stated = [seconds if seconds == "OOM" else f"{seconds:g}" for seconds in paper]
    cells = [f"{seconds} / {ours(one, name)}" for name, seconds in zip(PUBLISHED, stated, strict=True)]
    cells[-1] += f" / {ours(one, 'Jupiter, outlines')}"
    return [f"{one['environment']}, {one['model']}, {one['rate']}", *cells, ours(one, "Penstock")]


def phases(one: Mapping[str, Any]) -> list[str]:
    """A row of figures 10 and 11."""
    row = [f"{one['environment']}, {one['rate']}"]
    for name in COLUMNS:
        found = one["baselines"][name]["rings"] if name in METHODS else one["pipelines"][name]
        prompt, token = found["prompt_s"] / jupiter.PROMPT, found["tokens_s"] / jupiter.TOKENS
        row.append(f"{1e3 * prompt:.0f} + {1e3 * token:.0f}")
    return row


def total(found: Mapping[str, Any]) -> float:
    return float(found["prompt_s"] + found["tokens_s"])


def ours(one: Mapping[str, Any], name: str, counted: Sequence[str] = ("formula", "rings")) -> str:
    if name in METHODS:
        out = lacking(one, name)
        return " / ".join("OOM" if out else f"{total(one['baselines'][name][way]):.1f}" for way in counted)
    return f"{total(one['pipelines'][name]):.1f}" if one["pipelines"] else "OOM"


def lacking(one: Mapping[str, Any], name: str) -> bool:
    """Whether a baseline is out of memory on more than the Nano."""
    return len(one["baselines"][name]["lacking"]) > 1


def over_published(figures: Mapping[str, Any]) -> list[float]:
    """How many times as long as ours the paper says that Jupiter takes, by setting of Table IV."""
    return [published_seconds(one, "Jupiter") / total(one["pipelines"]["Penstock"]) for one in figures["settings"]]


def published_seconds(one: Mapping[str, Any], name: str) -> float:
    """Seconds of a setting in the paper's Table IV."""
    row = PAPER["table_4"][one["environment"]][one["model"]][one["rate"]]
    return float(row[PUBLISHED.index(name)])


def times_as_long(settings: list[Any], phases_s: Sequence[str], over: str, counted: str) -> Iterator[float]:
    """Ratio of times over ``over`` for every baseline that fits, and for EdgeShard."""
    for one in settings:
        base = sum(one["pipelines"][over][phase] for phase in phases_s)
        others = [one["baselines"][name][counted] for name in METHODS if not lacking(one, name)]
        for other in (*others, one["pipelines"]["EdgeShard"]):
            yield sum(other[phase] for phase in phases_s) / base


def is_table_5(shape: Mapping[str, Any]) -> bool:
    return (shape["points"], shape["tokens"]) == (IN_TABLE_5.points, IN_TABLE_5.tokens)


def gain(shape: Mapping[str, Any], way: str) -> str:
    """Speed over naive decoding."""
    return times(shape["seconds"]["naive"] / shape["seconds"][way])


def exchanged_values(figures: Any) -> Mapping[str, Any]:
    """The lines through published seconds by method, and bytes that ranks gave, of those priced."""
    line = {(one["environment"], one["model"], one["method"]): one for one in figures["fits"]}

    def megabytes(method: str, model: str = "7B", environment: str = "A") -> float:
        return float(line[environment, model, method]["megabytes"])

    priced = [max(one["counted_bytes"]) / one["priced_bytes"] for one in figures["counted"]]
    return {
        "fits": [one for one in figures["fits"] if one["method"] != "SP"],
        "megabytes": megabytes,
        "line": line["A", "7B", "M-LM"],
        "line_13b": line["A", "13B", "M-LM"],
        "most_of_one": max(one["13B"] for one in figures["readings"]),
        "least_of_all": exchanged.WHOLE * min(one["7B"] for one in figures["readings"]),
        "priced": (min(priced), max(priced)),
        "in_floats": next(one for one in figures["ours"] if one["model"] == "7B"),
    }


# ---------------------------------------------------------------------------------------------------------------- plans


def plans_values(figures: Any) -> Mapping[str, Any]:
    """The speed-up of our plans as a distribution."""
    others = []
    for other in (EVEN, PROPORTIONAL, JUPITER):
        found = plans.gains(figures, other)
        cuts = [found[round(share * (len(found) - 1))] for share in (0, 0.25, 0.5, 0.75, 1)]
        others.append((other, found, cuts, geometric_mean(found)))
    return {"others": others, "fewer": sum(one["used"] < one["devices"] for one in figures)}


def hosts_values(figures: Any) -> Mapping[str, Any]:
    """Median seconds of a question by way, both splits, and the speed-up by planning."""
    ways = {}
    for way in planned_hosts.WAYS:
        even, planned = (figures["seconds"][f"{way}, {split}"] for split in ("even", "planned"))
        pairs = zip(even, planned, strict=True)
        ways[way] = (median(even), median(planned), median(one / other for one, other in pairs))
    return {"ways": ways}


def kinds_values(figures: Any) -> Mapping[str, Any]:
    """The times of each kind, and the plans that differ."""
    return {
        "models": [one for one in figures if "ms" in one],
        "plans": [one for one in figures if "layers" in one],
        "times": times,
    }


# --------------------------------------------------------------------------------------------------- answers in points


def outlines_values(figures: Any) -> Mapping[str, Any]:
    return {
        "kinds": [*KINDS],
        "gains": [row for place, found in figures["speed"].items() for row in gains(place, found)],
        "shapes": [shape(place, found) for place, found in figures["speed"].items()],
    }


def place_of(place: str) -> str:
    return place if place == "this host" else f"`{place}`"


def shape(place: str, found: Sequence[Any]) -> Mapping[str, Any]:
    """Mean sizes of the answers in points."""
    some = [one for one in found if one["points"] and one["engine"] == "plain"]
    return {
        "place": place_of(place),
        "answers": len(some),
        "points": fmean(one["points"] for one in some),
        "tokens": fmean(one["tokens"] / one["points"] for one in some),
        "outline": fmean(one["outline_tokens"] for one in some),
    }


def gains(place: str, found: Sequence[Any]) -> Iterator[list[str]]:
    """A line for each engine that drafts: speculation, outlines and both over plain, and both over speculation."""
    rate = {(one["question"], one["engine"], one["mode"]): one["tokens"] / one["seconds"] for one in found}
    in_points = [one["question"] for one in found if one["points"] and one["engine"] == "plain"]

    def gain(way: tuple[str, str], over: tuple[str, str]) -> str:
        return times(geometric_mean(rate[question, *way] / rate[question, *over] for question in in_points))

    plain = ("plain", "off")
    for name in dict.fromkeys(one["engine"] for one in found if one["engine"] != "plain"):
        drafted, both = (name, "off"), (name, "on")
        cells = [gain(drafted, plain), gain(("plain", "on"), plain), gain(both, plain), gain(both, drafted)]
        yield [place_of(place), f"`{name}`" if name == "auto" else name, *cells]


def links_values(figures: Any) -> Mapping[str, Any]:
    """How many times the measured time the reckoned one is, at most."""
    return {"dearest": max(one["reckoned_ms"] / one["ms"] for one in figures["rows"])}


SECTIONS = {
    "jupiter": Section(how=jupiter.HOW, take=jupiter.take, values=values),
    "exchanged": replace(by_script(exchanged), values=exchanged_values),
    "plans": Section(how=plans.HOW, take=plans.take, values=plans_values),
    "megatron_links": Section(values=links_values),
    "planned_hosts": Section(values=hosts_values),
    "layer_kinds": Section(values=kinds_values),
    "outlines": Section(values=outlines_values),
}
