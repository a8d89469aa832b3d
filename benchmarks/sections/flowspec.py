"""FlowSpec (Liu et al., 2025) on its own clusters: tables 1 and 2 beside ours, as ratios over naive PP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.papers import flowspec_eagle
from benchmarks.papers.flowspec import CLUSTERS, PIPEDEC, STRATEGIES, TREE, ratio
from benchmarks.sections.base import Section
from benchmarks.sections.pipedec import simulations
from benchmarks.shared.measured import Taken
from benchmarks.shared.simulations import LABELS, find, over, said


def take() -> Taken:
    return simulations(list(CLUSTERS.values()), STRATEGIES, {"T0": 10_000, "T1": 10_000, "profile": 2000})


Source = tuple[str, str]
"""Name of the drafter, and a name of ``LABELS``."""


def tables(runs_of: Mapping[Source, Any]) -> Mapping[str, Any]:
    """Our cells of both tables, by source of drafts."""

    def ours(size: str) -> str:
        """Our rows of Table 1."""
        rows = []
        for (drafter, name), runs in runs_of.items():
            cells = [ratio(runs, strategy, CLUSTERS[size]) for strategy in (PIPEDEC, "flowspec", "auto", TREE)]
            label = LABELS[name] if name == "profile" else f"{LABELS[name]}, ours: {drafter}"
            rows.append(f"| {size}, {label} | {' | '.join(cells)} |")
        return "\n".join(rows)

    def ablated(strategy: str) -> str:
        return " | ".join(ratio(runs, strategy, CLUSTERS["7B"]) for runs in runs_of.values())

    labels = [LABELS[name] if name == "profile" else f"{drafter}, {LABELS[name]}" for drafter, name in runs_of]
    return {"ours": ours, "ablated": ablated, "labels": labels}


def eagle_values(figures: Any) -> Mapping[str, Any]:
    runs_of = eagle_runs(figures)
    return {
        **tables(runs_of),
        "beside_pipedec": [
            (drafter, beside_pipedec(runs_of, drafter)) for drafter in dict.fromkeys(drafter for drafter, _ in runs_of)
        ],
        "sizes": next(iter(figures.values())),
        "same": all(run["identical"] for runs in runs_of.values() for run in runs),
    }


def eagle_runs(figures: Any) -> dict[Source, Any]:
    """The runs on all clusters by EAGLE's drafter and temperature, in the order of the figures."""
    return {
        (flowspec_eagle.METHODS[method], name): [
            run for row in figures.values() if row["method"] == method for run in row[name]
        ]
        for method in dict.fromkeys(row["method"] for row in figures.values())
        for name in flowspec_eagle.TEMPERATURES
    }


def beside_pipedec(runs_of: Mapping[Source, Any], drafter: str) -> str:
    """FlowSpec over PipeDec by model and temperature, in words."""
    found = []
    for size, cluster in CLUSTERS.items():
        for (drafts, name), runs in runs_of.items():
            if drafts == drafter:
                own, other = (find(runs, strategy, cluster) for strategy in ("flowspec", PIPEDEC))
                found.append(f"{said(over(own, other))} ({size}, {LABELS[name]})")
    return ", ".join(found)


SECTIONS = {
    "flowspec": Section(
        how="Simulated, from recordings of the demo pair and with the synthetic profile",
        take=take,
        values=lambda figures: tables({("demo pair", name): runs for name, runs in figures.items()}),
    ),
    "flowspec_eagle": Section(values=eagle_values),
}
