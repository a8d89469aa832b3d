"""The first page's table: what its figures are made of, where a template cannot say it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import geometric_mean
from typing import Any

from benchmarks.costs.spd_overhead import LOST
from benchmarks.load.chaos import together
from benchmarks.papers import flowspec
from benchmarks.sections.jupiter import over_published, total
from benchmarks.sections.models import COMPARED
from benchmarks.sections.pipedec import WIDE
from benchmarks.sections.reaches import NATIVE, WHEEL, times_of
from benchmarks.shared.simulations import find
from benchmarks.strategies.shared_host import ratio_over
from penstock.lab.report import times

BUILDS = {NATIVE: "llama.cpp built for this processor", WHEEL: "its wheel, which uses no AVX-512"}


def auto_over_plain(figures: Mapping[str, Any]) -> float:
    return ratio_over(figures["seconds"].values(), "autoregressive", "auto").mean


def over_builds(ratios: Mapping[str, Sequence[float]]) -> str:
    """Plain decoding over llama.cpp's builds that were measured, with bounds: the one for this processor first."""
    found = {build: ratios[name] for build in BUILDS if (name := f"autoregressive over {build}") in ratios}
    return ", ".join(f"{times_of(ratio)} {BUILDS[build]}" for build, ratio in found.items())


def over_one_stage(figures: Mapping[str, Any]) -> float:
    return ratio_over(figures["seconds"].values(), "one stage, autoregressive", "two stages, auto").mean


def compared(figures: Mapping[str, Any]) -> tuple[int, int]:
    """Requests beside transformers, and the undecided among them."""
    counted = [one[kind] for one in figures.values() for kind in COMPARED]
    requests, undecided = (sum(one[count] for one in counted) for count in ("requests", "undecided"))
    return requests, undecided


def auto_and_widths(runs: Sequence[Any]) -> str:
    best = max(find(runs, name)["speedup"] for name in WIDE)
    return f"{times(find(runs, 'auto')['speedup'])} and {times(best)}"


def auto_and_flowspec(runs: Sequence[Any]) -> str:
    return " and ".join(flowspec.ratio(runs, name, "flowspec-7b") for name in ("auto", "flowspec"))


def over_jupiter(figures: Mapping[str, Any]) -> str:
    """Over the paper's seconds, and over our stand-in with outlines and without."""
    pipelines = [one["pipelines"] for one in figures["settings"]]
    published = over_published(figures)
    ours = [
        geometric_mean(total(one[name]) / total(one["Penstock"]) for one in pipelines)
        for name in ("Jupiter, outlines", "Jupiter")
    ]
    stated = f"{times(geometric_mean(published))} in the mean ({min(published):.2f} to {max(published):.2f} by setting)"
    stand_in = f"{' and '.join(map(times, ours))} over our stand-in, with its outlines and without"
    return f"{stated} over the paper's seconds; {stand_in}"


def wrong(problems: Sequence[str]) -> str:
    return f"{len(problems)} problems" if problems else "nothing went wrong, no token differed"


HELPERS = (
    *(auto_over_plain, over_builds, over_one_stage, compared, auto_and_widths, auto_and_flowspec, over_jupiter),
    *(together, wrong),
)
NAMES = {**{helper.__name__: helper for helper in HELPERS}, "lost": LOST}
"""Functions and figures that the template uses, by name."""
