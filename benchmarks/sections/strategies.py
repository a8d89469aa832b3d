"""Strategies and drafters: `auto` beside all others, what a wrong drafter costs, acceptance rules, drafters' time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.sections.base import Section, by_script
from benchmarks.shared.commands import with_json_output
from benchmarks.shared.measured import Taken
from benchmarks.shared.root import ROOT
from benchmarks.shared.simulations import LABELS, SAMPLINGS, recording
from benchmarks.strategies import always_wrong, same_texts
from penstock.lab.acceptance import LABELS as RULES


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


SECTIONS = {
    "always_wrong": by_script(always_wrong),
    "same_texts": Section(how="Simulated, from a recording of the demo pair", take=take_same_texts),
    "acceptance": Section(
        how="Computed from recordings of the demo pair",
        take=take_acceptance,
        values=lambda figures: {"labels": LABELS, "rules": RULES},
    ),
    "drafter_time": Section(values=time_values),
}
