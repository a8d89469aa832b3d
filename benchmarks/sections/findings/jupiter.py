"""Jupiter's findings (Ye et al., section VI) beside ours."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from benchmarks.sections.findings.verdicts import OTHER, Finding, counted, figures_of, of_cases, ranged
from benchmarks.sections.jupiter import is_table_5, lacking, times_as_long, total
from benchmarks.shared.published import published
from penstock.lab.report import times

PAPER: Final = "Jupiter"
COMPUTED: Final = "pipelines simulated, the others computed from the bytes that cross a link"


def findings() -> Iterator[Finding]:
    figures = figures_of("jupiter")

    def finding(place: str, claim: str, stated: str, ours: str, verdict: str, how: str = COMPUTED) -> Finding:
        return Finding(paper=PAPER, place=place, claim=claim, stated=stated, ours=ours, verdict=verdict, how=how)

    def over_jupiter(names: Sequence[str]) -> list[float]:
        found = []
        for one in figures["settings"]:
            own = total(one["pipelines"]["Jupiter, outlines"])
            for name in names:
                if name == "EdgeShard":
                    found.append(total(one["pipelines"][name]) / own)
                elif not lacking(one, name):
                    found.append(total(one["baselines"][name]["rings"]) / own)
        return found

    for names, claim, stated in (
        (("M-LM", "DT", "Galaxy"), "faster than tensor parallelism", "up to 26.1x"),
        (("SP",), "faster than sequence parallelism", "up to 3.3x"),
        (("EdgeShard",), "faster than EdgeShard", "up to 2.7x"),
    ):
        found = over_jupiter(names)
        cases = [one > 1 for one in found]
        ours = f"{ranged(found)}x, more than 1 {counted(cases, 'settings')}"
        yield finding("VI-B, Table IV", claim, stated, ours, of_cases(cases))
    for phase, place, claim, stated in (
        ("prompt_s", "VI-C, figures 10 and 11", "prompts take less time than with any other", "1.4 to 7.4x"),
        ("tokens_s", "VI-C, figures 10 and 11", "new tokens take less time than with any other", "2.9 to 33.2x"),
    ):
        found = [*times_as_long(figures["settings"], [phase], "Jupiter", "rings")]
        cases = [one > 1 for one in found]
        ours = f"{ranged(found, '.1f')}x, more than 1 {counted(cases, 'settings')}"
        yield finding(place, claim, stated, ours, of_cases(cases))
    without = [one["model"] == "13B" and lacking(one, "SP") for one in figures["settings"] if one["model"] == "13B"]
    yield finding(
        "VI-B, Table IV",
        "a replica of 13B fits no board",
        "out of memory",
        counted(without, "settings"),
        of_cases(without),
    )
    yield from (finding(*cells) for cells in in_points())


def in_points() -> Iterator[tuple[str, ...]]:
    """Tables V to VII: rows of a finding."""
    paper = published("jupiter")["table_5"]
    for place, (way, words) in enumerate(
        (("chain", "with a chain of drafts"), ("outlines", "in points"), ("both", "with both"))
    ):
        ours = {}
        for one in figures_of("jupiter")["answers"]:
            if is_table_5(one):
                ours[one["model"]] = one["seconds"]["naive"] / one["seconds"][way]
        yield (
            "VI-E, Table V",
            f"decoding is faster {words}",
            " and ".join(f"{cells[place]:.1f}x" for cells in paper.values()),
            " and ".join(times(ours[model]) for model in paper),
            of_cases([one > 1 for one in ours.values()]),
            "simulated; the paper does not state its points",
        )
    yield (
        "VI-E, Tables VI and VII",
        "answers in points are about as good as plain ones",
        "0.05 to 0.52 of 10 points less",
        "no judge",
        OTHER,
        "a model of 135M parameters judged itself",
    )
