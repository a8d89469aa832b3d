"""The report on pipelines and speculation in vLLM (Zhao and Tong): Tables 2 and 3 beside ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.papers import pp_eagle_table, pp_many, pp_parallel
from benchmarks.sections.base import Section, by_script
from benchmarks.shared.published import published
from penstock.lab.grid import PLAIN

PAPER = published("vllm")


def values(figures: Any) -> Mapping[str, Any]:
    """The rows of Table 2, the paper's and ours, by method. Plain decoding is the same beside every drafter."""
    sizes, table = map(str, pp_eagle_table.SIZES), PAPER["table_2"]
    plain = {stages: table["none"][stages] for stages in sizes}
    own = {method: [row for row in figures.values() if row["method"] == method] for method in pp_eagle_table.METHODS}
    rows = [["paper: none", stages, *cells(None, None, rate, after, after)] for stages, (rate, after) in plain.items()]
    rows += [ours("none", row, PLAIN) for row in next(some for some in own.values() if some)]
    for method, some in own.items():
        theirs = {stages: (*table[method][stages], after) for stages, (_, after) in plain.items()}
        rows += [[f"paper: {method}", stages, *cells(*found)] for stages, found in theirs.items()]
        rows += [ours(f"{method}, chain of 5", row, pp_eagle_table.CHAIN) for row in some]
        rows += [ours(f"{method}, `auto`", row, "auto") for row in some]
    return {
        "rows": rows,
        "eagle_words": eagle_words(own),
        "same": all(one["identical"] for row in figures.values() for one in row["entries"].values()),
    }


def eagle_words(own: Mapping[str, Sequence[Any]]) -> str:
    """Whether EAGLE-3 accepts more than EAGLE here, over the fewest stages; that it is open without the two of them."""
    if not all(own[method] for method in pp_eagle_table.METHODS):
        return "one of them is not measured"
    eagle, eagle3 = (own[method][0]["entries"][pp_eagle_table.CHAIN]["AR"] for method in pp_eagle_table.METHODS)
    return f"it accepts {'more' if eagle3 > eagle else 'less'} (AR {eagle3:.3f} against {eagle:.3f})"


def ours(label: str, row: Mapping[str, Any], entry: str) -> list[str]:
    one, plain = row["entries"][entry], row["entries"][PLAIN]
    length = None if entry == PLAIN else one["AL"]
    return [f"ours: {label}", str(row["stages"]), *cells(one["AR"], length, None, one["Lat"], plain["Lat"])]


def cells(
    rate: float | None, length: float | None, throughput: float | None, latency: float, plain: float
) -> list[str]:
    some = ["NA" if value is None else f"{value:.4f}" for value in (rate, length)]
    return [*some, "NA" if throughput is None else f"{throughput:,.2f}", f"{latency:.4f}", f"{latency / plain:.2f}"]


def many_values(figures: Any) -> Mapping[str, Any]:
    found = {(one["stages"], one["entry"]): one for one in figures if one["drafter"] == "last"}

    def auto_over(entry: str, name: str) -> list[float]:
        return [found[stages, "auto"][name] / found[stages, entry][name] for stages in pp_many.SIZES]

    shares, latencies = auto_over(PLAIN, "throughput"), auto_over(pp_eagle_table.CHAIN, "latency")
    first = {one["stages"]: one for one in figures if one["drafter"] == "first"}
    moved = {
        name: [f"{one[name] / found[stages, one['entry']][name]:.2f}" for stages, one in first.items()]
        for name in ("latency", "throughput")
    }
    return {"paper": PAPER, "shares": shares, "latencies": latencies, "moved": moved, "moved_over": [*first]}


def parallel_values(figures: Any) -> Mapping[str, Any]:
    """Each row with the paper's and with both throughputs of its model's first row."""
    by_way = {(one["model"], way_of(one)): one for one in figures}
    firsts: dict[str, Any] = {}
    for one in figures:
        firsts.setdefault(one["model"], one)

    def rate_and_latency(model: str, way: pp_parallel.Way) -> list[float]:
        return list(PAPER["parallel"][model][",".join(map(str, way))])

    def firsts_of(model: str) -> tuple[float, Any]:
        first = firsts[model]
        return rate_and_latency(model, way_of(first))[0], first.get("throughput")

    def gain(model: str, way: pp_parallel.Way, over: pp_parallel.Way) -> str:
        return f"{by_way[model, way]['throughput'] / by_way[model, over]['throughput']:.1f}"

    def speed_ups(name: str, column: int) -> str:
        """How many times better the 8B's rows of tp alone are than one GPU, here and in the paper."""
        found = []
        for tp in (2, 4, 8):
            own = by_way["8B", (1, 1, tp)][name] / by_way["8B", (1, 1, 1)][name]
            paper = rate_and_latency("8B", (1, 1, tp))[column] / rate_and_latency("8B", (1, 1, 1))[column]
            found.append(f"{own:.2f} ({paper:.2f}) at tp {tp}")
        return ", ".join(found)

    rows = [(one, rate_and_latency(model, way), firsts_of(model)) for (model, way), one in by_way.items()]
    return {"rows": rows, "gain": gain, "speed_ups": speed_ups}


def way_of(one: Mapping[str, Any]) -> pp_parallel.Way:
    return one["dp"], one["pp"], one["tp"]


SECTIONS = {
    "pp_eagle_table": Section(values=values),
    "pp_many": replace(by_script(pp_many), values=many_values),
    "pp_parallel": replace(by_script(pp_parallel), values=parallel_values),
}
