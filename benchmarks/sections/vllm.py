"""The report on pipelines and speculation in vLLM (Zhao and Tong): Table 2 beside ours, and its two executors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.papers import centralised, pp_eagle_table, pp_many, pp_parallel
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
PARALLEL: dict[str, dict[pp_parallel.Way, tuple[float, float]]] = {
    "70B": {
        (1, 1, 8): (5124.71, 4.0056),
        (1, 2, 4): (3340.88, 4.5031),
        (1, 4, 2): (2021.28, 5.1158),
        (1, 8, 1): (1158.59, 8.7999),
        (2, 1, 4): (2873.84, 4.2392),
        (2, 2, 2): (1793.06, 5.3387),
        (2, 4, 1): (1004.93, 8.5786),
        (4, 1, 1): (14337.97, 0.9761),
    },
    "8B": {
        (1, 1, 1): (14337.97, 0.9761),
        (1, 1, 2): (20205.60, 1.2889),
        (1, 1, 4): (26361.79, 1.2422),
        (1, 1, 8): (31102.90, 1.2071),
        (1, 2, 1): (14374.24, 1.0679),
        (1, 2, 2): (20104.27, 1.3782),
        (1, 2, 4): (25933.18, 1.3127),
        (1, 4, 1): (14802.28, 1.1989),
        (1, 4, 2): (19498.03, 1.5484),
        (1, 8, 1): (14550.69, 1.9514),
        (2, 1, 1): (14012.60, 0.9712),
        (2, 1, 2): (19477.50, 1.2499),
        (2, 1, 4): (25574.67, 1.2724),
        (2, 2, 1): (14340.26, 1.0522),
        (2, 2, 2): (20050.50, 1.3769),
        (2, 4, 1): (14621.41, 1.2022),
        (4, 1, 1): (13217.98, 0.9616),
        (4, 1, 2): (18871.89, 1.2789),
        (4, 2, 1): (13754.61, 1.0277),
        (8, 1, 1): (12210.67, 0.9896),
    },
}
"""Table 3's TP and Lat on HumanEval by (dp, pp, tp); the 8B's first row is Table 2's."""
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


def take_parallel() -> Taken:
    return [f"python -m benchmarks.papers.{pp_parallel.NAME}"], pp_parallel.measured()


def render_parallel(figures: Any) -> str:
    rows = [parallel_row(one, figures) for one in figures]
    headings = ["", "dp", "pp", "tp", "paper: TP", "/ first", "ours: TP", "/ first", "paper: Lat", "ours: Lat"]
    return paragraphs(
        "Predicted by the prices of tensor parallel stages, before an engine runs any: eight H100 of one server, "
        "chains of five tokens from a drafter on the last stage's first GPU. The paper's columns are Table 3's for "
        f"HumanEval. TP is of {pp_many.MANY:,} sequences together ({pp_parallel.TOKENS_FOR_THROUGHPUT} tokens each "
        f'here, at most 256 in the paper), Lat of {pp_many.FEW} of {pp_parallel.TOKENS_FOR_LATENCY}. "/ first" is TP '
        "over that of the model's first row.",
        markdown(headings, rows),
        "Tensor parallel rows of the 8B beside one GPU, and in brackets the paper's: TP "
        f"{speed_ups(figures, 'TP')}; Lat {speed_ups(figures, 'Lat')}. A gather takes 0.02 ms here (assumed), four in "
        "each of 32 layers 2.6 ms: about what two GPUs save of the 5.6 in which one reads the weights. So one request "
        "gains little from tp here and loses in the paper; a thousand at once, whose rows take computing, gain nearly "
        "as much as there.",
        "Where the prediction differs: the paper's TP hardly changes with pp and falls with dp, because its stages "
        "waited for each other with every batch (section 4.2) and its replicas contend for processors (4.3); ours do "
        f"neither, so that replicas bring most here, {gain_of_8b(figures, (8, 1, 1)):.1f} times at (8, 1, 1) and "
        f"{gain_of_8b(figures, (4, 2, 1)):.1f} at (4, 2, 1), as the report had expected. Its 70B has 4.4 times the TP "
        f"with tp 8 that it has with pp 8, ours {ratio_of_70b(figures):.1f} times. Ours takes longer for several "
        "stages at four sequences, most likely because it spreads them over as many batches, and the drafter's passes "
        "for each hold up the GPU of the last stage.",
        "The report's own errors. Its row (4, 1, 1) of the 70B repeats, in all 20 cells, that of the 8B with EAGLE-3 "
        "on one GPU (Table 2), which the 8B's part of Table 3 lacks: 141 GB do not fit on a GPU of 80, and the report "
        "itself says that four are needed. Section 4.3 says that (1, 1, 8) has the 70B's lowest latency; on MT-bench "
        "(2, 1, 4) has, and on Alpaca (2, 1, 4) and (1, 2, 4) are lower. In Table 2 (1, 2, 2) with EAGLE-3 has the "
        "same TP on Alpaca as on GSM8K, 15,497.52; Table 3 has 13,809.18 for Alpaca. Section 4.2 calls Table 2 Table "
        "3, and the 70B is Llama-3.3 in section 4.1 and Llama-3.1 in 4.3.",
    )


def ratio_of_70b(figures: Any) -> float:
    """TP of the 70B with eight tensor parallel ranks over that with eight stages."""
    by_way = {(one["dp"], one["pp"], one["tp"]): one for one in figures if one["model"] == "70B"}
    return float(by_way[1, 1, 8]["throughput"] / by_way[1, 8, 1]["throughput"])


def gain_of_8b(figures: Any, way: pp_parallel.Way) -> float:
    """TP of the 8B spread in this way over that of one GPU."""
    by_way = {(one["dp"], one["pp"], one["tp"]): one for one in figures if one["model"] == "8B"}
    return float(by_way[way]["throughput"] / by_way[1, 1, 1]["throughput"])


def parallel_row(one: Any, figures: Any) -> list[str]:
    way = (one["dp"], one["pp"], one["tp"])
    firsts = [other for other in figures if other["model"] == one["model"]]
    throughput, latency = PARALLEL[one["model"]][way]
    first = PARALLEL[one["model"]][firsts[0]["dp"], firsts[0]["pp"], firsts[0]["tp"]][0]
    paper = [f"{throughput:,.0f}", f"{throughput / first:.2f}"]
    if "refused" in one:
        return [one["model"], *map(str, way), *paper, "does not fit", "", f"{latency:.3f}", ""]
    ours = [f"{one['throughput']:,.0f}", f"{one['throughput'] / firsts[0]['throughput']:.2f}"]
    return [one["model"], *map(str, way), *paper, *ours, f"{latency:.3f}", f"{one['latency']:.3f}"]


def speed_ups(figures: Any, column: str) -> str:
    """How many times better the 8B's rows of tp alone are than one GPU, in the paper and here."""
    name, index = {"TP": ("throughput", 0), "Lat": ("latency", 1)}[column]
    by_way = {(one["dp"], one["pp"], one["tp"]): one for one in figures if one["model"] == "8B"}
    found = []
    for tp in (2, 4, 8):
        ours = by_way[1, 1, tp][name] / by_way[1, 1, 1][name]
        paper = PARALLEL["8B"][1, 1, tp][index] / PARALLEL["8B"][1, 1, 1][index]
        found.append(f"{ours:.2f} ({paper:.2f}) at tp {tp}")
    return ", ".join(found)


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
    Section(
        name=pp_parallel.NAME,
        title="Data, pipeline and tensor parallelism, Table 3, predicted",
        how=pp_parallel.HOW,
        take=take_parallel,
        render=render_parallel,
    ),
)
