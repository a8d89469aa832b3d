"""FlowSpec (Liu et al., 2025) on its own clusters: tables 1 and 2 beside ours, as ratios over naive PP."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.papers import flowspec_eagle
from benchmarks.papers.flowspec import (
    CLUSTERS,
    NAIVE,
    NEITHER,
    NO_EXPANSION,
    NO_ORDER,
    ONCE,
    PIPEDEC,
    SEGMENTS,
    STRATEGIES,
    TREE,
    ratio,
)
from benchmarks.sections.base import Section, paragraphs
from benchmarks.shared import virtual
from benchmarks.shared.measured import Taken
from benchmarks.shared.simulations import LABELS, simulated, source
from penstock.lab.common import markdown

SOURCES = {"T0": 10_000, "T1": 10_000, "profile": 2000}
"""Most tokens of each source."""

TABLE_1 = {
    ("7B", "T0"): {"Llama-2": ((1.12, 0.97), (1.35, 1.33)), "Vicuna": ((1.23, 1.27), (1.38, 1.43))},
    ("7B", "T1"): {"Llama-2": ((1.21, 1.09), (1.35, 1.33)), "Vicuna": ((1.53, 1.53), (1.42, 1.39))},
    ("13B", "T0"): {"Llama-2": ((1.20, 1.02), (1.66, 1.68)), "Vicuna": ((1.49, 1.25), (1.70, 1.67))},
    ("13B", "T1"): {"Llama-2": ((1.27, 1.10), (1.62, 1.52)), "Vicuna": ((1.71, 1.73), (1.73, 1.86))},
}
"""PipeDec's and FlowSpec's speed-ups, each as the mean of six data sets and on HumanEval; by size, temperature and
model."""
TABLE_2 = {
    "Pruned PP": ((1.23, 1.18), (1.21, 1.18)),
    "FlowSpec without score order": ((1.32, 1.26), (1.30, 1.29)),
    "FlowSpec": ((1.37, 1.35), (1.33, 1.36)),
}
"""Ratios of the printed tokens per second for Llama-2 7B, at T = 0 and at T = 1, each as the mean of four data sets and
on HumanEval."""


def take() -> Taken:
    commands, figures = [], {}
    for name, tokens in SOURCES.items():
        command, figures[name] = simulated(list(CLUSTERS.values()), STRATEGIES, source(name, tokens))
        commands.append(command)
    return commands, figures


def render(figures: Any) -> str:
    return f"{table_1(figures)}\n\n{table_2(figures)}"


def table_1(figures: Any) -> str:
    return paragraphs(
        "**Table 1.** The paper's rows are the mean of six data sets and, in brackets, HumanEval, the one that "
        "is code as ours is. Its clusters are the presets `flowspec-7b` and `flowspec-13b`: four Jetson Orin "
        "Nano, a fifth drafting.",
        rows_1(figures, "demo pair"),
        f"Naive PP is the paper's (appendix A.1): a tree of 80 nodes, six deep, sent in {SEGMENTS} segments, then "
        f"nothing until all are back. Ours is `{NAIVE}`. The last column sends that tree in one batch, and "
        "says what that alone gains on these boards, where a batch of 80 rows takes no longer than one of 16. What "
        "else differs: the drafts are the demo pair's or the profile's, not EAGLE-2's, with a modelled EAGLE-2 pass "
        "for every level drafted; and the 13B's speed is fitted to this very table (the preset says how).",
    )


def rows_1(figures: Any, drafter: str) -> str:
    rows = [line for size in CLUSTERS for line in [*published_rows(size), *our_rows(size, figures, drafter)]]
    headings = ["over naive PP", "PipeDec, width 16", "FlowSpec", "Penstock's `auto`", "tree in one batch"]
    return markdown(headings, rows)


def published_rows(size: str) -> Iterator[list[str]]:
    for name in ("T0", "T1"):
        for model, cells in TABLE_1[size, name].items():
            values = [f"{mean:.2f}x ({code:.2f}x)" for mean, code in cells]
            yield [f"{size}, {LABELS[name]}, paper: {model}", *values, "", ""]


def our_rows(size: str, figures: Any, drafter: str) -> Iterator[list[str]]:
    cluster = CLUSTERS[size]
    for name, runs in figures.items():
        label = f"{size}, synthetic profile" if name == "profile" else f"{size}, {LABELS[name]}, ours: {drafter}"
        yield [label, *(ratio(runs, strategy, cluster) for strategy in (PIPEDEC, "flowspec", "auto", TREE))]


def table_2(figures: Any) -> str:
    return paragraphs(
        "**Table 2**, the ablations. The paper's: Llama-2 7B, mean of four data sets and, in brackets, "
        "HumanEval; ours on `flowspec-7b`.",
        rows_2(figures, "demo pair", OURS),
        "At T = 0 the paper prints 1.17x for FlowSpec without score order, which is its ratio of latencies; its "
        "tokens per second give 1.32x, as the other rows' do theirs. It does not say whether Pruned PP keeps the "
        "score order; both are here.",
    )


OURS = {
    "Pruned PP": NO_EXPANSION,
    "Pruned PP, without score order": NEITHER,
    "FlowSpec without score order": NO_ORDER,
    "FlowSpec": "flowspec",
}
"""Names of Table 2's rows, and of one more, by their name here."""


def rows_2(figures: Any, drafter: str, ours: Mapping[str, str]) -> str:
    rows = [
        [
            f"{label}: `{strategy}`",
            *(f"{mean:.2f}x ({code:.2f}x)" for mean, code in TABLE_2.get(label, ())),
            *[""] * (0 if label in TABLE_2 else 2),
            *(ratio(runs, strategy, CLUSTERS["7B"]) for runs in figures.values()),
        ]
        for label, strategy in ours.items()
    ]
    headings = ["7B, over naive PP", "paper, T = 0", "paper, T = 1"]
    headings += ["synthetic profile" if name == "profile" else f"{drafter}, {LABELS[name]}" for name in figures]
    return markdown(headings, rows)


def render_eagle(figures: Any) -> str:
    by_temperature = {
        name: [run for row in figures.values() for run in row[name]] for name in flowspec_eagle.TEMPERATURES
    }
    runs = [run for some in by_temperature.values() for run in some]
    same = "All outputs identical." if all(run["identical"] for run in runs) else "NOT all outputs identical."
    return paragraphs(
        "The tables [above](#flowspec-tables-1-and-2) with an EAGLE-3 drafter of the demo target, which comes with the "
        "package: real tokens, each pass of the drafter in the time that is modelled for EAGLE-2's. It reads the "
        f"target's states, so that an expansion drafts anew from nodes that were drafted from before. {same}",
        rows_1(by_temperature, "`eagle3`"),
        rows_2(by_temperature, "`eagle3`", {**OURS, "FlowSpec, each node drafted from once": ONCE}),
    )


SECTIONS = (
    Section(
        name="flowspec",
        title="FlowSpec, Tables 1 and 2",
        how="Simulated, from recordings of the demo pair and with the synthetic profile",
        take=take,
        render=render,
    ),
    Section(
        name=flowspec_eagle.NAME,
        title="FlowSpec, Tables 1 and 2, with EAGLE",
        how=virtual.HOW,
        take=None,
        render=render_eagle,
    ),
)
