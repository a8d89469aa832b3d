"""The report on pipelines and speculation in vLLM (Zhao and Tong): Table 2 beside ours, and its two executors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.papers import centralised, pp_eagle_table, pp_many
from benchmarks.sections.base import Section, paragraphs
from benchmarks.shared import virtual
from benchmarks.shared.measured import Taken
from penstock.lab.common import markdown
from penstock.lab.grid import PLAIN

Columns = tuple[float | None, float | None, float, float]
"""The report's AR, AL, TP and Lat."""

TABLE_2: dict[str, dict[int, Columns]] = {
    "none": {
        1: (None, None, 17095.76, 2.3768),
        2: (None, None, 17303.33, 2.6438),
        4: (None, None, 17262.86, 4.0829),
    },
    "eagle": {
        1: (0.4524, 3.1465, 10167.45, 1.3069),
        2: (0.4524, 3.1490, 10332.06, 1.4591),
        4: (0.4525, 3.1537, 10570.92, 1.6195),
    },
    "eagle3": {
        1: (0.6498, 4.4069, 14337.97, 0.9761),
        2: (0.6498, 4.4081, 14374.24, 1.0679),
        4: (0.6498, 4.4070, 14802.28, 1.1989),
    },
}
"""Llama-3.1-8B on HumanEval, by pipeline stages, without tensor or data parallelism."""
TABLE_3: dict[int, Columns] = {8: (0.6499, 4.4227, 14550.69, 1.9514)}
"""EAGLE-3 over eight stages, without tensor or data parallelism."""
HEADINGS = ("AR", "AL", "TP, tokens/s", "Lat, s", "Lat / none's")


def render(figures: Any) -> str:
    rows = [["paper: none", stages, *cells(*none(stages), none(stages)[3])] for stages in pp_eagle_table.SIZES]
    rows += [["ours: none", row["stages"], *ours(row, PLAIN)] for row in first_method(figures)]
    for method in pp_eagle_table.METHODS:
        own = [row for row in figures.values() if row["method"] == method]
        rows += [
            [f"paper: {method}", stages, *cells(*TABLE_2[method][stages], none(stages)[3])]
            for stages in pp_eagle_table.SIZES
        ]
        rows += [[f"ours: {method}, chain of 5", row["stages"], *ours(row, pp_eagle_table.CHAIN)] for row in own]
        rows += [[f"ours: {method}, `auto`", row["stages"], *ours(row, "auto")] for row in own]
    return paragraphs(
        "The paper's rows: Llama-3.1-8B on H100 of one machine, HumanEval, the set that is code as ours is; TP of up "
        "to 1024 sequences together, Lat of four of at most 256 tokens. Ours: one request at a time, "
        f"{next(iter(figures.values()))['tokens']} tokens each, on the same GPUs as modelled, drafted on the last one.",
        markdown(["", "pp", *HEADINGS], [[str(value) for value in row] for row in rows]),
        f"{identical(figures)} AL is 1 + accepted tokens per chain; of `auto`, whose tree grows on until a miss, per "
        "tree. The report's drafters are the published ones for the 8B; ours draft for the demo target. It does not "
        "say how long its chains are: (AL - 1) / AR, which would be their length, is 4.7 and 5.2 here, and from 3.6 to "
        "5.2 over its five data sets.",
    )


def none(stages: int) -> Columns:
    return TABLE_2["none"][stages]


def first_method(figures: Mapping[str, Any]) -> list[Any]:
    """The rows of the first method, which suffice for plain decoding: it is the same beside every drafter."""
    method = next(iter(figures.values()))["method"]
    return [row for row in figures.values() if row["method"] == method]


def ours(row: Mapping[str, Any], entry: str) -> list[str]:
    one, plain = row["entries"][entry], row["entries"][PLAIN]
    length = None if entry == PLAIN else one["AL"]
    return cells(one["AR"], length, one["TP"], one["Lat"], plain["Lat"])


def cells(rate: float | None, length: float | None, throughput: float, latency: float, plain: float) -> list[str]:
    some = ["NA" if value is None else f"{value:.4f}" for value in (rate, length)]
    return [*some, f"{throughput:,.2f}", f"{latency:.4f}", f"{latency / plain:.2f}"]


def identical(figures: Mapping[str, Any]) -> str:
    same = all(one["identical"] for row in figures.values() for one in row["entries"].values())
    return "All outputs identical to plain decoding." if same else "NOT all outputs identical to plain decoding."


def render_executors(figures: Any) -> str:
    rows = [
        [
            case,
            f"`{name}`",
            f"{one['direct_ms']:.1f}",
            f"{one['relayed_ms']:.1f}",
            f"{one['ratio']:.3f}x ({one['low']:.3f}-{one['high']:.3f})",
            f"{one['overruns']:.1%}",
        ]
        for case, found in figures.items()
        for name, one in found["entries"].items()
    ]
    headings = ["pipeline", "strategy", "direct, ms per token", "relayed", "relayed / direct (95%)", "overruns"]
    same = all(one["identical"] for found in figures.values() for one in found["entries"].values())
    return paragraphs(
        "The report's first design has the engine relay every hop between stages; its second, and ours, has the stages "
        "talk to each other. `benchmarks/papers/relay.py` is the first. The boards are those of the "
        "preset demo, on one switch: a hop by way of the engine takes the time of two. In virtual time nothing else "
        "counts; without boards nothing but what the relaying process costs. Pairs are the same request on both.",
        markdown(headings, rows),
        f"Outputs of both are {'identical' if same else 'NOT IDENTICAL'}. Plainly, one request sends a row at a time: "
        "8 kB, 0.07 ms on a gigabit link, beside stages of 62 ms. Speculating, it sends many rows at once.",
    )


def take_many() -> Taken:
    return [f"python -m benchmarks.papers.{pp_many.NAME}"], pp_many.measured()


def render_many(figures: Any) -> str:
    rows = [
        [
            f"ours: `{one['entry']}`{drafting(one)}",
            str(one["stages"]),
            f"{one['throughput']:,.0f}",
            f"{one['latency']:.3f}",
        ]
        for one in figures
    ]
    rows += [
        [f"paper: {method}", str(stages), f"{found[2]:,.0f}", f"{found[3]:.3f}"]
        for method, by_stages in ({**TABLE_2, "eagle3": {**TABLE_2["eagle3"], **TABLE_3}}).items()
        if method != "eagle"
        for stages, found in by_stages.items()
    ]
    by_entry = {(one["stages"], one["entry"]): one["throughput"] for one in figures if one["drafter"] == "last"}
    shares = [by_entry[stages, "auto"] / by_entry[stages, PLAIN] for stages in pp_many.SIZES]
    return paragraphs(
        f"TP is of {pp_many.MANY:,} sequences together, Lat of {pp_many.FEW}, {pp_many.TOKENS} tokens each. The "
        "paper's rows: HumanEval, at most 256 tokens each (Tables 2 and 3, without tensor and data parallelism). Ours: "
        "the same GPUs as modelled, and a synthetic drafter that accepts as the paper's EAGLE-3 does there.",
        markdown(["", "pp", "TP, tokens/s", "Lat, s"], rows),
        "The paper's stages waited for each other with every batch (section 4.2), so that its TP stays as it is with "
        "more of them; ours leave out what its kernels and its Python take. So many sequences fill the stages by "
        "themselves, and drafts only take time from them. `auto` finds that out by trying: it reaches "
        f"{min(shares):.3f} to {max(shares):.3f} of plain decoding's TP. Its Lat is the lowest from four stages on.",
        "The drafter sits on the last stage. On the first one (section 3.4), with the sampler, every row's logits and "
        f"the three states that EAGLE-3 reads come back, {pp_many.RETURNED_ROW_BYTES / 1e3:.0f} kB a row. On this "
        "server's links that takes less than is gained where the drafter no longer shares the GPU that has the head: "
        "at each pp Lat is lower there, and TP is higher at four stages, lower at two and eight. Penstock's last stage "
        "samples wherever the drafter is, so that its logits stay where they are.",
    )


def drafting(one: Any) -> str:
    return ", drafted on the first stage" if one["drafter"] == "first" else ""


SECTIONS = (
    Section(
        name=centralised.NAME,
        title="Direct links and the centralised executor",
        how=centralised.HOW,
        take=None,
        render=render_executors,
    ),
    Section(
        name=pp_eagle_table.NAME,
        title="Pipelines and EAGLE in vLLM, Table 2",
        how=virtual.HOW,
        take=None,
        render=render,
    ),
    Section(
        name=pp_many.NAME,
        title="Pipelines and EAGLE in vLLM, Tables 2 and 3, many sequences",
        how=pp_many.HOW,
        take=take_many,
        render=render_many,
    ),
)
