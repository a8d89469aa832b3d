"""``penstock demo``: the plain pipeline and Penstock write the same text on four emulated boards, side by side."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table

from penstock.bench.measure.comparison import measure
from penstock.bench.measure.summary import StrategyRun
from penstock.bench.prompts import read_prompts
from penstock.cluster import Cluster, load_cluster, stage_timings
from penstock.core import SamplingParams
from penstock.demo.race import PENSTOCK, PLAIN, TITLES, Race
from penstock.engine import options
from penstock.engine.loop import Observer
from penstock.speculation import SpeculativeConfig
from penstock.trace import EMULATED

if TYPE_CHECKING:
    from penstock.engine.commit import Advance
    from penstock.requests.request import Request

CLUSTER: Final = "demo"
PROMPTS: Final = 2
TOKENS: Final = 48
"""Per prompt: both runs of two prompts and the start take three quarters of a minute."""
SPECULATION: Final = SpeculativeConfig(method="draft_model", model="demo", strategy=PENSTOCK)
STRATEGIES: Final = [(PLAIN, None), (PENSTOCK, SPECULATION)]


def run_demo(as_json: bool) -> None:
    """Run the demo on this terminal; with ``as_json`` stdout gets one object and nothing else."""
    cluster = load_cluster(CLUSTER)
    prompts = read_prompts(options.DEMO / "prompts.jsonl", PROMPTS)
    console = Console(stderr=as_json, highlight=False)
    live = console.is_terminal and not console.is_dumb_terminal and not as_json
    with (live_screen if live else line_screen)(console, cluster, prompts) as screen:
        runs = compare(cluster, prompts, screen)
    if as_json:
        print(json.dumps(summary(runs)))
    else:
        print_report(console, cluster, runs)


def compare(cluster: Cluster, prompts: Sequence[str], screen: Race | Lines) -> list[StrategyRun]:
    """Every prompt through the plain pipeline, then through Penstock, on the same stages.

    Sampled, since a small model that decodes greedily repeats itself; past an end-of-text token, so that all outputs
    have one length.
    """
    from penstock.engine.llm import LLM

    params = [SamplingParams(temperature=1.0, seed=i, max_tokens=TOKENS, ignore_eos=True) for i in range(len(prompts))]
    with LLM("demo", cluster=cluster, speculative_config=SPECULATION, enable_prefix_caching=False) as llm:
        return measure(llm, prompts, params, STRATEGIES, observer=screen, on_progress=screen.begin)


# ------------------------------------------------------------------------------------------------------------ screens


@contextmanager
def live_screen(console: Console, cluster: Cluster, prompts: Sequence[str]) -> Iterator[Race]:
    """The race, redrawn some times a second by a thread of its own; its texts stay when it is over.

    On the alternate screen every picture overwrites the one before it: nothing is erased, so nothing flickers.
    """
    race = Race(console, cluster, prompts)
    with Live(race, console=console, screen=True, refresh_per_second=8):
        yield race
    console.print(race.texts())


@contextmanager
def line_screen(console: Console, cluster: Cluster, prompts: Sequence[str]) -> Iterator[Lines]:
    console.print(f"Penstock demo. {sentence(cluster.description)} {sentence(EMULATED)}", soft_wrap=True)
    console.print(f"Starting {len(cluster.stages)} stages and the draft model ...")
    yield Lines(console)


class Lines(Observer):
    """One line per run, for a file or a pipe."""

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
    """What ``--json`` prints."""
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
    if not all(run.valid for run in runs):
        worst = max(run.overrun_fraction for run in runs)
        console.print(
            f"[yellow]Not valid:[/] {worst:.0%} of the batches and drafts took longer here than on a modelled board. "
            "Is this machine busy with something else?"
        )


def table_of(runs: Sequence[StrategyRun]) -> Table:
    plain = runs[0]
    table = Table(title=EMULATED, title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("", no_wrap=True)
    for heading in ("tokens/s", "speed-up", "accepted/step", "busy", "same text"):
        table.add_column(heading, justify="right")
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
