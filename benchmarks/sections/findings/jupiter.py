"""Jupiter's findings (Ye et al., sections II and VI) beside ours."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

from benchmarks.sections.findings.verdicts import OTHER, Finding, counted, figures_of, of_cases, of_sizes, ranged
from benchmarks.sections.jupiter import is_table_5, lacking, times_as_long, total
from benchmarks.shared.published import published
from penstock.lab.plan import METHODS
from penstock.lab.report import times

PAPER: Final = "Jupiter"
COMPUTED: Final = (
    "boards calibrated to Table IV: pipelines simulated, the others computed from the bytes on a link, no bounds"
)
NO_JUDGE: Final = "a model of 135M parameters judged itself"


def findings() -> Iterator[Finding]:
    figures = figures_of("jupiter")
    settings = figures["settings"]
    for rows in (exchanging(settings), wholes(settings), phases(settings), scaling(figures["boards"]), in_points()):
        for place, claim, stated, ours, verdict, how in rows:
            yield Finding(paper=PAPER, place=place, claim=claim, stated=stated, ours=ours, verdict=verdict, how=how)


def exchanging(settings: Sequence[Any]) -> Iterator[tuple[str, ...]]:
    """Table II: a row of a finding."""
    slow = [one for one in settings if one["environment"] == "A" and one["rate"] == "100 Mbps"]
    found = [one["baselines"][name]["rings"]["ratio"] for one in slow for name in METHODS]
    stated = [ratio for rates in published("jupiter")["table_2"].values() for ratio in rates["100 Mbps"]]
    yield (
        "II-C, Table II",
        "at 100 Mbps the others take longer to exchange a prompt than to compute it",
        f"{ranged(stated)}x",
        f"{ranged(found)}x",
        of_cases([one > 1 for one in found]),
        "boards calibrated to this table; computed from the bytes on a link, no bounds",
    )


def wholes(settings: Sequence[Any]) -> Iterator[tuple[str, ...]]:
    """Table IV: rows of a finding."""
    hetero = [one for one in settings if one["environment"] == "B"]
    for some, names, claim, stated, most in (
        (settings, ("M-LM", "DT", "Galaxy"), "faster than tensor parallelism", "up to 26.1x", 26.1),
        (settings, ("SP",), "faster than sequence parallelism", "up to 3.3x", 3.3),
        (settings, ("EdgeShard",), "faster than EdgeShard", "up to 2.7x", 2.7),
        (hetero, (*METHODS, "EdgeShard"), "faster than every other over boards that differ (B)", "2.6 to 21.9x", 21.9),
    ):
        found = list(over_jupiter(some, names))
        cases = [one > 1 for one in found]
        ours = f"{ranged(found)}x, more than 1 {counted(cases, 'settings')}"
        yield "VI-B, Table IV", claim, stated, ours, of_sizes(cases, [max(found)], [most]), COMPUTED
    without = [lacking(one, "SP") for one in settings if one["model"] == "13B"]
    claim = "a replica of 13B fits no board"
    yield "VI-B, Table IV", claim, "out of memory", counted(without, "settings"), of_cases(without), COMPUTED


def over_jupiter(settings: Sequence[Any], names: Sequence[str]) -> Iterator[float]:
    """How many times as long others take as our stand-in with outlines, where they fit."""
    for one in settings:
        own = total(one["pipelines"]["Jupiter, outlines"])
        for name in names:
            if name == "EdgeShard":
                yield total(one["pipelines"][name]) / own
            elif not lacking(one, name):
                yield total(one["baselines"][name]["rings"]) / own


def phases(settings: list[Any]) -> Iterator[tuple[str, ...]]:
    """Figures 10 and 11: rows of a finding."""
    for phase, claim, stated in (
        ("prompt_s", "prompts take less time than with any other", "1.4 to 7.4x"),
        ("tokens_s", "new tokens take less time than with any other", "2.9 to 33.2x"),
    ):
        yield over_others(settings, [phase], "VI-C, figures 10 and 11", claim, stated)


def scaling(boards: list[Any]) -> Iterator[tuple[str, ...]]:
    """Figure 12: rows of a finding."""
    by_rate: dict[str, list[float]] = {}
    for one in boards:
        by_rate.setdefault(one["rate"], []).append(total(one["pipelines"]["Jupiter"]))
    cases = [after < before for seconds in by_rate.values() for before, after in pairwise(seconds)]
    ours = "; ".join(f"{', '.join(f'{one:.1f}' for one in found)} s at {rate}" for rate, found in by_rate.items())
    yield "VI-D, Fig. 12", "each further board makes it faster (1 to 4)", "no number", ours, of_cases(cases), COMPUTED
    claim = "faster than any other over 1 to 4 boards"
    yield over_others(boards, ["prompt_s", "tokens_s"], "VI-D, Fig. 12", claim, "up to 23.7x")


def over_others(settings: list[Any], phases_s: Sequence[str], place: str, claim: str, stated: str) -> tuple[str, ...]:
    """A row on the times of all others over those of our stand-in without outlines."""
    found = [*times_as_long(settings, phases_s, "Jupiter", "rings")]
    cases = [one > 1 for one in found]
    ours = f"{ranged(found, '.1f')}x, more than 1 {counted(cases, 'settings')}"
    return place, claim, stated, ours, of_cases(cases), COMPUTED


def in_points() -> Iterator[tuple[str, ...]]:
    """Tables V to VII: rows of a finding."""
    paper = published("jupiter")["table_5"]
    answers = figures_of("jupiter")["answers"]
    for place, (way, words) in enumerate(
        (("chain", "with a chain of drafts"), ("outlines", "in points"), ("both", "with both"))
    ):
        ours = [one["seconds"]["naive"] / one["seconds"][way] for one in answers]
        alike = [gain for gain, one in zip(ours, answers, strict=True) if is_table_5(one)]
        yield (
            "VI-E, Table V",
            f"decoding is faster {words}",
            " and ".join(f"{cells[place]:.1f}x" for cells in paper.values()),
            f"{ranged(ours)}x over seven shapes of answers, of which four points of 64 tokens have "
            f"{' and '.join(map(times, alike))}",
            of_cases([one > 1 for one in ours]),
            "simulated, no bounds; points and right drafts, which the paper does not state, are assumed",
        )
    yield (
        "VI-E, Table VI",
        "answers in points are about as good as plain ones",
        "0.05 to 0.52 of 10 points less",
        worded(),
        OTHER,
        NO_JUDGE,
    )
    yield (
        "VI-E, Table VII",
        "answers in points are as good on generic, knowledge and counterfactual questions, worse on code and maths",
        "0.00 to 1.16 points more, 1.17 to 3.00 less",
        "no judge",
        OTHER,
        NO_JUDGE,
    )


def worded() -> str:
    """The judgement that is stored: by the likelihood of the answers alone."""
    whole: Mapping[str, Any] = next(
        one for one in figures_of("quality")["alone"]["categories"] if one["category"] == "all"
    )
    found = whole["perplexity"]
    return (
        f"no judge; to the model itself they are {found['mean']:.2f} times as perplexing "
        f"({found['low']:.2f} to {found['high']:.2f})"
    )
