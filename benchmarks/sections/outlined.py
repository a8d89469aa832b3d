"""Answers in points with a real model: its decisions for or against them, their speed, and their quality."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, geometric_mean
from typing import Any, Final

from benchmarks.sections.base import Section, paragraphs
from benchmarks.strategies import outlines, quality
from penstock.lab.common import bounds, length, markdown, times
from penstock.outlines.dialogue import KINDS

TABLE_6: Final = {
    "7B": {"Vicuna-80": (7.05, 6.59), "WizardLM": (6.26, 6.21), "LiMA": (6.72, 6.20)},
    "13B": {"Vicuna-80": (7.19, 6.85), "WizardLM": (6.85, 6.70), "LiMA": (6.77, 6.25)},
}
"""GPT-4o's grades of plain answers and of answers in points."""
TABLE_7: Final = {
    "7B": {
        "generic": (6.17, 7.33),
        "knowledge": (7.17, 7.17),
        "counterfactual": (6.75, 6.75),
        "coding": (7.07, 4.07),
        "math": (4.33, 3.16),
    },
    "13B": {
        "generic": (7.25, 7.58),
        "knowledge": (7.33, 7.67),
        "counterfactual": (7.25, 7.75),
        "coding": (7.07, 4.29),
        "math": (4.83, 2.33),
    },
}
"""The same grades for Vicuna-80, by category."""
HERE: Final = "this host"


def render_outlines(figures: Any) -> str:
    """Decisions by category, and speed over plain decoding."""
    decisions, speed = figures["decisions"], figures["speed"]
    rows = [
        [name, str(sum(found.values())), *(str(found.get(kind, 0)) for kind in KINDS)]
        for name, found in decisions.items()
    ]
    names = ["four stages of", "drafts", "speculation", "outlines", "both", "both over speculation"]
    return paragraphs(
        "A point is what plain decoding of its own prompt gives; the whole is not the plain answer. A model of 135M "
        "parameters decides and writes here. What form its answer is given by `auto`, by set and category of the "
        "question: by the question's words where it speaks of code or brings a long text, else by one constrained "
        "token:",
        markdown(["", "questions", *KINDS], rows),
        "Speed for questions whose answers are lists: tokens per second of the answer (of the points, without titles; "
        "prompt and outline count), geometric mean, over plain decoding. `jupiter-homogeneous` is its four boards with "
        "Llama-2-7B's times, in virtual time, with this model's outlines and points; *its chain* and `auto` have a "
        "drafter whose first candidate is right in 60% of the steps.",
        markdown(names, [line for place, found in speed.items() for line in gains(place, found)]),
        " ".join(map(shape, speed.items())),
        ids_remark(figures["ids"]),
        "What limits them is the outline, whose tokens come one after another. Where four stages share two cores, "
        "points side by side add none. On boards they use what a plain answer leaves idle, beside a drafter, too. "
        "[Table V](#jupiter-tables-ii-iv-and-v) has short titles and longer points, which gain more.",
    )


def ids_remark(found: Sequence[Mapping[str, Any]]) -> str:
    """A remark that compares each point with plain decoding of its own prompt."""
    differ, temperatures = sum(one["differ"] for one in found), dict.fromkeys(one["temperature"] for one in found)
    names = " and ".join(dict.fromkeys(one["engine"].replace("plain", "plain decoding") for one in found))
    return (
        f"Each point's ids beside those of plain decoding of its own prompt over one stage: of "
        f"{sum(one['points'] for one in found)} points with {sum(one['tokens'] for one in found):,} tokens, decoded "
        f"side by side over {outlines.STAGES} stages of this host by {names} at T = "
        f"{' and '.join(f'{one:g}' for one in temperatures)}, {differ or 'none'} "
        f"{'differs' if differ < 2 else 'differ'}."
    )


def shape(measured: tuple[str, list[Any]]) -> str:
    place, found = measured
    some = [one for one in found if one["points"] and one["engine"] == "plain"]
    outline, points = (fmean(one[name] for one in some) for name in ("outline_tokens", "points"))
    return (
        f"On {place_of(place)} {len(some)} answers have {points:.1f} points of "
        f"{fmean(one['tokens'] / one['points'] for one in some):.0f} tokens in the mean, behind outlines of "
        f"{outline:.0f}."
    )


def place_of(place: str) -> str:
    return place if place == HERE else f"`{place}`"


def gains(place: str, found: list[Any]) -> list[list[str]]:
    """A line for each engine that drafts: speculation, outlines and both over plain, and both over speculation."""
    rate = {(one["question"], one["engine"], one["mode"]): one["tokens"] / one["seconds"] for one in found}
    in_points = [one["question"] for one in found if one["points"] and one["engine"] == "plain"]

    def gain(way: tuple[str, str], over: tuple[str, str]) -> str:
        return times(geometric_mean(rate[question, *way] / rate[question, *over] for question in in_points))

    plain, lines = ("plain", "off"), []
    for name in dict.fromkeys(one["engine"] for one in found if one["engine"] != "plain"):
        drafted, both = (name, "off"), (name, "on")
        cells = [gain(drafted, plain), gain(("plain", "on"), plain), gain(both, plain), gain(both, drafted)]
        lines.append([place_of(place), f"`{name}`" if name == "auto" else name, *cells])
    return lines


def render_quality(figures: Mapping[str, Any]) -> str:
    """Quality without a judge, with one, and the paper's tables."""
    alone, judged = figures["alone"], figures["judged"]
    asked = alone["settings"]
    return paragraphs(
        "`penstock bench quality` answers every question twice, plainly and in points, whatever the question is: so do "
        f"the paper's Tables VI and VII. Up to {asked['num_prompts']} questions of each category, answers of at most "
        f"{asked['max_tokens']} tokens. *In points* are those whose outline could be read and had room.",
        "**Without a judge**: how likely the model itself finds an answer to the question as it was asked, in nats per "
        "token, and how many times as surprised it is by the one in points (perplexity, by question; 95%). A plain "
        "answer was decoded greedily, so that hardly any text can be likelier: what counts is which categories lose "
        "most.",
        markdown(
            ["", "questions", "in points", "plain", "points", "perplexity, points / plain", "95%"],
            [by_itself(one) for one in alone["categories"]],
        ),
        "**With a judge**: the model itself, behind `penstock serve`. A model of 135M parameters is no judge: this "
        "shows that the command works from end to end. Questions of each category: "
        f"{judged['settings']['num_prompts']}.",
        markdown(
            ["", "in points", "plain, 1-10", "points, 1-10", "prefers plain / points / neither", "no verdict read"],
            [by_judge(one) for one in judged["categories"]],
        ),
        f"Of the pairs that it compared in both orders, {unread(judged['categories'])} have no verdict that can be "
        "read: it does not keep to the form that it is asked for.",
        "**The paper's Tables VI and VII**: GPT-4o's grades, plain / in points.",
        markdown(["by set", *TABLE_6["7B"]], graded(TABLE_6)),
        markdown(["Vicuna-80, by category", *TABLE_7["7B"]], graded(TABLE_7)),
    )


def by_itself(one: Mapping[str, Any]) -> list[str]:
    ratio = one["perplexity"]
    found = None if ratio is None or ratio["low"] is None else [ratio["low"], ratio["high"]]
    mean = length(None if ratio is None else ratio["mean"])
    counts = [str(one[name]) for name in ("questions", "in_points")]
    return [one["category"], *counts, length(one["plain_nats"]), length(one["points_nats"]), mean, bounds(found)]


def by_judge(one: Mapping[str, Any]) -> list[str]:
    chosen = " / ".join(str(one["preferred"][name]) for name in ("plain", "points", "neither"))
    ratings = [length(one[name]) for name in ("plain_rating", "points_rating")]
    return [one["category"], str(one["in_points"]), *ratings, chosen, str(one["unread"])]


def unread(categories: Sequence[Mapping[str, Any]]) -> str:
    everything = categories[-1]
    return f"{everything['unread']} of {everything['in_points']}"


def graded(table: Mapping[str, Mapping[str, tuple[float, float]]]) -> list[list[str]]:
    return [
        [f"Llama-2-{model}", *(f"{plain:.2f} / {points:.2f}" for plain, points in found.values())]
        for model, found in table.items()
    ]


SECTIONS = (
    Section(name=outlines.NAME, title="Answers in points", how=outlines.HOW, take=None, render=render_outlines),
    Section(name=quality.NAME, title="Quality of answers in points", how=quality.HOW, take=None, render=render_quality),
)
