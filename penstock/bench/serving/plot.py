"""Plots a serving bench: throughput and latencies over concurrency. It needs matplotlib, which is optional."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock.bench.plots import DPI, HUES, SMALL, bare, save
from penstock.bench.serving.metrics import Summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SHOWN: Final = (("e2el", "whole request"), ("ttft", "first token"), ("tpot", "per token"))


def write_plot(path: Path, title: str, summaries: Sequence[Summary]) -> None:
    """Plot throughput on the left (PipeDec, figure 8), and latencies on the right, on a logarithmic axis."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), dpi=DPI, layout="constrained")
    left, right = figure.subplots(1, 2)
    x = [one.concurrency or 0 for one in summaries]
    left.plot(x, [one.output_throughput for one in summaries], color=HUES[0], marker="o")
    left.set_ylim(bottom=0)
    finish(left, x, "output tokens per second")
    draw_latencies(right, x, summaries)
    right.set_yscale("log")
    finish(right, x, "milliseconds")
    figure.legend(fontsize=SMALL, frameon=False, loc="outside right upper")
    figure.suptitle(title, fontsize=10)
    save(figure, path)


def draw_latencies(axes: Axes, x: Sequence[int], summaries: Sequence[Summary]) -> None:
    """Draw each median as a line, and its 99th percentile dotted in the same colour."""
    for (name, words), colour in zip(SHOWN, HUES, strict=False):
        found = [one.latencies[name] for one in summaries]
        for figure, style in (("median", "-"), ("p99", ":")):
            y = [getattr(latency, figure) if latency else float("nan") for latency in found]
            axes.plot(x, y, style, color=colour, marker="o", markersize=3, label=f"{words}, {figure}")


def finish(axes: Axes, x: Sequence[int], label: str) -> None:
    if min(x) > 0 and max(x) / min(x) >= 8:
        axes.set_xscale("log", base=2)
    axes.set_xticks(x, [str(value) for value in x])
    axes.minorticks_off()
    axes.set_xlabel("requests at a time (concurrency)", fontsize=9)
    axes.set_ylabel(label, fontsize=9)
    axes.tick_params(labelsize=SMALL)
    axes.grid(axis="y", alpha=0.3)
    bare(axes)
