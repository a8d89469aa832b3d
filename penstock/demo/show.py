"""``penstock demo``: the plain pipeline and Penstock write the same text on four emulated boards, side by side."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rich.console import Console
from rich.live import Live
from rich.table import Table

from penstock.bench.measure.comparison import measure, on_time
from penstock.bench.measure.summary import MAX_OVERRUNS, StrategyRun
from penstock.cluster import Cluster, load_cluster, plain_step_seconds, stage_timings
from penstock.demo.race import PENSTOCK, PLAIN, TITLES, Race
from penstock.demo.scene import Scene, scene_for
from penstock.engine.loop import Observer
from penstock.tables import FiguresTable
from penstock.trace import EMULATED

if TYPE_CHECKING:
    from penstock.engine.commit import Advance
    from penstock.requests.request import Request

CLUSTER: Final = "demo"
BUSY_PACE: Final = 1.05
"""Slowdown of plain tokens, relative to the modelled boards, from which on the host is too busy for the figures."""


def run_demo(as_json: bool, *, embedded: bool = False) -> None:
    """Run the demo on this terminal; with ``as_json`` stdout gets one object and nothing else.

    ``embedded`` uses the shipped pair without a look at the package registry.
    """
    cluster = load_cluster(CLUSTER)
    console = Console(stderr=as_json, highlight=False)
    scene = scene_for(console, embedded=embedded)
    live = console.is_terminal and not console.is_dumb_terminal and not as_json
    with (live_screen if live else line_screen)(console, cluster, scene) as screen:
        runs = compare(cluster, scene, screen)
    if as_json:
        print(json.dumps({"model": Path(scene.model).stem, **summary(runs)}))
    else:
        print_report(console, cluster, runs)


def compare(cluster: Cluster, scene: Scene, screen: Race | Lines) -> list[StrategyRun]:
    """Run every prompt through the plain pipeline and then through Penstock, on the same stages."""
    from penstock.emulation.host import RealTimeHost
    from penstock.engine.llm import LLM

    strategies = [(PLAIN, None), (PENSTOCK, scene.speculation)]
    with LLM(
        scene.model,
        quantization=scene.quantization,
        cluster=cluster,
        speculative_config=scene.speculation,
        enable_prefix_caching=False,
        host=RealTimeHost(),
    ) as llm:
        prompts = scene.prompts(llm.get_tokenizer())
        with on_time(llm):
            return measure(llm, prompts, scene.params, strategies, observer=screen, on_progress=screen.begin)


# ------------------------------------------------------------------------------------------------------------ screens


@contextmanager
def live_screen(console: Console, cluster: Cluster, scene: Scene) -> Iterator[Race]:
    """The race, redrawn some times a second by a thread of its own; its texts stay when it is over.

    On the alternate screen every picture overwrites the one before it: nothing is erased, so nothing flickers.
    """
    race = Race(console, cluster, scene.shown, scene.words)
    with Live(race, console=console, screen=True, refresh_per_second=8):
        yield race
    console.print(race.texts())
    console.print(scene.words)


@contextmanager
def line_screen(console: Console, cluster: Cluster, scene: Scene) -> Iterator[Lines]:
    console.print(f"Penstock demo. {sentence(cluster.description)} {sentence(EMULATED)}", soft_wrap=True)
    console.print(scene.words, soft_wrap=True)
    console.print(f"Starting {len(cluster.stages)} stages ...")
    yield Lines(console)


class Lines(Observer):
    """Prints one line per run, for a file or a pipe."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._what = ""
        self._started = 0.0

    def begin(self, strategy: str, index: int, total: int) -> None:
        self._what = f"prompt {index + 1} of {total}, {TITLES[strategy]}"
        self._started = time.monotonic()

    def advanced(self, request: Request, done: Advance, at: float) -> None:
        if done.finished is not None:
            self._console.print(f"{self._what}: {request.produced} tokens in {at - self._started:.1f} s")


# ------------------------------------------------------------------------------------------------------------- report


def summary(runs: Sequence[StrategyRun]) -> dict[str, object]:
    """The object that ``--json`` prints."""
    plain, penstock = runs
    return {
        "identical": penstock.identical_to_autoregressive,
        "speedup": speedup(plain, penstock),
        "runs": [run.as_dict() for run in runs],
    }


def speedup(plain: StrategyRun, penstock: StrategyRun) -> float:
    return penstock.tokens_per_second / plain.tokens_per_second


def print_report(console: Console, cluster: Cluster, runs: Sequence[StrategyRun]) -> None:
    plain, penstock = runs
    step = max(timing.seconds(1) for timing in stage_timings(cluster))
    console.print()
    console.print(table_of(runs))
    if penstock.identical_to_autoregressive:
        console.print(f"[bold green]The same text, token for token, {speedup(plain, penstock):.1f} times as fast.[/]")
    else:
        console.print("[bold red]The texts differ.[/] Please report this: they never should.")
    console.print(
        f"A step is one stage's time, {step * 1e3:.0f} ms: plain, a token needs {len(cluster.stages)} of them in a row."
    )
    console.print(overrun_words(runs))
    if reason := busy_words(cluster, runs):
        console.print(f"[yellow]This host was busy:[/] {reason}. The figures suffer; run it again when less else runs.")


def overrun_words(runs: Sequence[StrategyRun]) -> str:
    shares = " and ".join(f"{run.overrun_fraction:.1%} ({TITLES[run.strategy]})" for run in runs)
    return f"Overruns, batches and drafts that took longer here than on a modelled board: {shares}."


def busy_words(cluster: Cluster, runs: Sequence[StrategyRun]) -> str:
    """Signs that the host did not keep up with the boards; empty where it did."""
    reasons = []
    worst = max(run.overrun_fraction for run in runs)
    if worst > MAX_OVERRUNS:
        reasons.append(f"{worst:.0%} of the batches and drafts took longer than on a modelled board")
    pace = 1.0 / runs[0].tokens_per_second / plain_step_seconds(cluster)
    if pace > BUSY_PACE:
        reasons.append(f"plain tokens took {pace - 1:.0%} longer than the boards need for them")
    return ", and ".join(reasons)


def table_of(runs: Sequence[StrategyRun]) -> Table:
    plain = runs[0]
    table = FiguresTable("", "tokens/s", "speed-up", "accepted/step", "busy", "same text", title=EMULATED)
    for run in runs:
        table.add_row(
            TITLES[run.strategy],
            f"{run.tokens_per_second:.2f}",
            f"{speedup(plain, run):.2f}x",
            f"{run.tokens_per_stage_time:.2f}",
            f"{sum(run.stage_busy) / len(run.stage_busy):.0%}",
            "-" if run is plain else "yes" if run.identical_to_autoregressive else "NO",
            style="bold" if run is not plain else None,
        )
    return table


def sentence(text: str) -> str:
    return text[0].upper() + text[1:] + "."
