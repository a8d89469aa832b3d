"""Sections that follow no paper: exactness, overhead, the demo, and processes without emulation."""

from __future__ import annotations

import time
from typing import Any

from benchmarks.costs import decisions, lookup, overhead, two_processes
from benchmarks.sections.base import Section, paragraphs, prose
from benchmarks.shared.commands import command_line, penstock, with_json_output
from benchmarks.shared.measured import Taken
from penstock.lab.common import markdown


def render_exactness(figures: Any) -> str:
    return "\n".join(prose(f"- {one['what']}: **{one['result']}** (`{one['command']}`)") for one in figures)


def take_overhead() -> Taken:
    return ["python -m benchmarks.costs.overhead"], overhead.measured()


def render_overhead(figures: Any) -> str:
    rows = [
        [
            f"{run['layers']} layers, `{run['strategy']}`",
            f"{run['ms']:.2f}",
            f"{run['modelled_ms']:.2f}",
            f"{run['ms'] / run['modelled_ms'] - 1:.1%}",
            f"{run['hop_ms']:.2f}",
            f"{run['loop_ms']:.2f}",
            f"{run['overruns']:.1%}",
        ]
        for run in figures
    ]
    headings = ["model, decoding", "ms per token", "modelled", "over", "hop, ms", "loop, ms", "overruns"]
    return paragraphs(
        "14 stage processes of 10 ms each, next to nothing on the links: plainly, a row goes through all "
        "stages; with a drafter that is always right, one leaves the last stage at every step.",
        markdown(headings, rows),
        "With the two-layer model most stages hold no layer, so the figure is Penstock's own; with 16 layers the "
        "stages' real computation competes with the messages for two cores; above 5% of overruns a figure says nothing "
        "but that this host is too slow for it. Measured as root: what keeps time comes before what else runs there.",
    )


SIMULATE = ["simulate", "--cluster", "pipedec-14x3090", "--tokens", "10000"]


def take_decisions() -> Taken:
    runs = decisions.measured()
    started = time.perf_counter()
    penstock(SIMULATE)
    return ["python -m benchmarks.costs.decisions", command_line(SIMULATE)], {
        "runs": runs,
        "simulate_seconds": time.perf_counter() - started,
    }


def render_decisions(figures: Any) -> str:
    def cells(run: Any) -> list[str]:
        counts = [f"`{run['strategy']}`", f"{run['live']:,.0f}", f"{run['rows']:.0f}"]
        times = [f"{run['ms'][part][0]:.2f} ({run['ms'][part][1]:.2f})" for part in ("engine", "stage", "total")]
        return counts + times

    headings = ["strategy", "live nodes", "rows a step", "engine", "one stage", "both"]
    return paragraphs(
        "The engine's step from one result to the next (commit, prune, cancel, grow the tree, choose rows, build the "
        "batch) and one stage's bookkeeping (which slots every row sees), without model and sockets, on one core: "
        "milliseconds, median and, in brackets, 95th percentile, of the quickest of three runs. With 64 stages, so "
        "that about 2,000 drafted nodes live.",
        markdown(headings, [cells(run) for run in figures["runs"]]),
        "The late ones follow a miss: hundreds of nodes die, and the tree is grown anew. This machine's speed varies "
        "by half within minutes.",
        "A comparison of the plain pipeline, `static_tree`, `pipedec` and `auto` over 14 stages and 10,000 tokens each "
        f"took {figures['simulate_seconds']:.0f} s on one core.",
    )


def take_lookup() -> Taken:
    return ["python -m benchmarks.costs.lookup"], lookup.measured()


def render_lookup(figures: Any) -> str:
    rows = [
        [f"{one['length']:,}", f"{one['first_ms']:.1f}", f"{one['ms']:.3f} ({one['p95_ms']:.3f})"] for one in figures
    ]
    return paragraphs(
        f"Method `ngram`, asked about {lookup.DEPTH} nodes below the root of a random text over {lookup.VOCABULARY} "
        "tokens, one more of which is committed between two questions: milliseconds of one core, median and, in "
        "brackets, 95th percentile. The first question takes in the whole prompt.",
        markdown(["tokens of text", "first", "each later one"], rows),
    )


def take_demo() -> Taken:
    command, content = with_json_output(["demo", "--embedded"])
    fast = content["runs"][1]
    names = ("strategy", "overrun_fraction")
    figures = {**{name: fast[name] for name in names}, **{name: content[name] for name in ("speedup", "identical")}}
    return [command], figures


def render_demo(figures: Any) -> str:
    same = "identical to" if figures["identical"] else "DIFFERENT from"
    return prose(
        f"Two prompts of 48 tokens at T = 1 on four emulated edge boards: {figures['speedup']:.2f} times the plain "
        f"pipeline with `{figures['strategy']}`, {same} its text, {figures['overrun_fraction']:.1%} overruns."
    )


def take_two_processes() -> Taken:
    return ["python -m benchmarks.costs.two_processes"], two_processes.measured()


def render_two_processes(figures: Any) -> str:
    rows = [
        [f"{run['stages']}, `{run['strategy']}`", f"{run['tokens_per_second']:.1f}", f"{run['ratio']:.2f}x"]
        for run in figures
    ]
    return paragraphs(
        "The demo pair as one stage process and as two, on two cores; `static_tree` with 12 nodes, `pipedec` "
        "with width 4.",
        markdown(["stages, strategy", "tokens/s", "over plain, one stage"], rows),
        "The model is so small (7M parameters) that messages and Python take longer than its arithmetic; the "
        "draft model, a third process, takes its share of the two cores. This is not what a pipeline is for, "
        "and is shown as it came out.",
    )


SECTIONS = (
    Section(name="exactness", title="Exactness", how="Measured", take=None, render=render_exactness),
    Section(
        name="overhead",
        title="Overhead",
        how="Emulated, with a drafter that is always right",
        take=take_overhead,
        render=render_overhead,
    ),
    Section(
        name="decisions",
        title="Decisions",
        how="Measured, without a model",
        take=take_decisions,
        render=render_decisions,
    ),
    Section(
        name=lookup.NAME,
        title="Looking up n-grams",
        how=lookup.HOW,
        take=take_lookup,
        render=render_lookup,
    ),
    Section(name="demo", title="The demo", how="Emulated, with the demo pair", take=take_demo, render=render_demo),
    Section(
        name="two_processes",
        title="Without emulation",
        how="Measured, with the demo pair",
        take=take_two_processes,
        render=render_two_processes,
    ),
)
