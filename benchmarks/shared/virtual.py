"""Real models under a virtual clock: every strategy and drafter over a modelled cluster, all in this process.

    sizes = virtual.Sizes(prompts=10, tokens=64)
    drafter = {"method": "eagle3", "model": "path/to/eagle3"}
    runs = virtual.compared(load_cluster("spd-4"), drafter, ["pipedec", "auto"], virtual.asked(sizes))

Only stages, links, drafter and feature lines take time, as modelled, so that every run gives the same tokens and times
on any machine. Tokens are the real models', drafts the real drafter's. A run takes as long as its arithmetic on one
core.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.shared.benchmark import Benchmark, show
from benchmarks.shared.measured import kept_figures, path_of, store, stored
from benchmarks.shared.paired import paired
from benchmarks.shared.replayed import Replay, ReplayingExecutor
from benchmarks.shared.root import ROOT
from penstock import LLM, SamplingParams
from penstock.cluster import Cluster, load_cluster
from penstock.emulation.cluster import RealTimeExecutor
from penstock.engine.options import DEMO
from penstock.lab.bench.comparison import measure_all, on_time
from penstock.lab.bench.summary import StrategyRun
from penstock.lab.grid import DEFAULT_PROMPTS, Question, conversations_of, is_plain, parse_entries, read_prompt_sets
from penstock.lab.report import Ratio
from penstock.pipeline.base import VirtualClock
from penstock.pipeline.engine_end import InProcessExecutor

HOW = "In virtual time, with the demo target"
TARGET, DRAFT = str(DEMO / "target"), str(DEMO / "draft")
INSTANT = {"bandwidth_gbit_s": 1e9, "latency_ms": 0.0}
FAST = 1e9
"""Rate of a device on which rows cost nothing, in 1e12 operations per second."""

Case = tuple[str, Callable[[], dict[str, Any]]]
"""A key of a section's figures, and the function that measures them."""


@dataclass(frozen=True)
class Sizes:
    """Size of a measurement: the first ``prompts`` prompts of held-out code, ``tokens`` tokens of each."""

    prompts: int = 10
    tokens: int = 64


@dataclass(frozen=True)
class Wanted:
    """The choices of a script's command line."""

    sizes: Sizes
    drafters: Mapping[str, Sequence[str]]
    """Folders of drafters that are there, by method."""
    options: argparse.Namespace


def asked(sizes: Sizes, temperatures: Sequence[float] = (0.0, 1.0), top_k: int = 0) -> list[Question]:
    params = SamplingParams(top_k=top_k, seed=0, max_tokens=sizes.tokens)
    sets = read_prompt_sets([DEFAULT_PROMPTS], sizes.prompts)
    return [one.opening for one in conversations_of(sets, temperatures, 1, params, 1)]


# -------------------------------------------------------------------------------------------------------------- running


def compared(
    cluster: Cluster,
    drafter: Mapping[str, Any],
    entries: Sequence[str],
    questions: Sequence[Question],
    *,
    processes: bool = False,
    replayed: bool = False,
    **options: Any,
) -> list[StrategyRun]:
    """The runs of every entry, plain decoding first, measured like ``penstock bench``.

    ``drafter`` is a ``speculative_config`` without a strategy; ``options`` are the engine's. With ``processes`` the
    runs take place in emulated stage processes, with their overhead, and not in virtual time. With ``replayed`` the
    target computes plain decoding's texts alone: nothing but that is then a check of the tokens.
    """
    torch.set_num_threads(1)
    named = parse_entries(tuple(entries), drafter)
    drafting = [config for _, config in named if config is not None and not is_plain(config)]
    widest = max(drafting, key=lambda config: config.strategy_options.most_rows)
    replay = Replay() if replayed else None
    host = RealTimeExecutor() if processes else in_process(replay)
    engine = LLM(host=host, cluster=cluster, speculative_config=widest, enable_prefix_caching=False, **options)
    with engine as llm, on_time(llm) if processes else nullcontext():
        if replay is None:
            return measure_all(llm, questions, named)
        replay.record(llm, questions)
        return measure_all(llm, questions, named, on_progress=replay.turn_to)


def in_process(replay: Replay | None) -> InProcessExecutor:
    return InProcessExecutor(VirtualClock()) if replay is None else ReplayingExecutor(replay)


def in_lockstep(name: str, draft_pass_ms: float = 0.01) -> Cluster:
    """A preset whose stages all take the same time, with drafts and links that take next to none.

    This is SPD's idea of a pipeline: K counts its steps, and a draft is there when the next one begins.
    """
    kinds = {str(one.kind): {"pass_ms": 1.0, "compute_tflops": FAST} for one in load_cluster(name).devices}
    return load_cluster(name, kinds=kinds, draft_pass_ms=draft_pass_ms, links={"local": INSTANT})


def find(runs: Sequence[StrategyRun], entry: str, temperature: float) -> StrategyRun:
    return next(run for run in runs if (run.strategy, run.temperature) == (entry, temperature))


def seconds(run: StrategyRun) -> list[float]:
    """The seconds of each request, but for those of one token, which have no time with any strategy."""
    return [float(f"{one['seconds']:.5g}") for one in run.requests if one["seconds"]]


def over(run: StrategyRun, base: StrategyRun) -> Ratio:
    """Speed relative to ``base`` on the same requests, with bounds."""
    return paired(seconds(base), seconds(run))


# -------------------------------------------------------------------------------------------------------------- scripts


def main(
    file: str,
    cases: Callable[[Wanted], Iterable[Case]],
    methods: Sequence[str] = (),
    how: str = HOW,
    sizes: Sizes = Sizes(),
    given: str | Callable[[argparse.Namespace], str] = "",
    **options: Any,
) -> None:
    """Run a script by its ``__file__``: measure, store and print each case, unless it is stored with these sizes.

    ``options`` are the script's own, as ``Benchmark.parser`` takes them, and ``given`` is, or makes, their part of the
    stored command. Options that name drafters of ``methods`` and set the sizes, by default ``sizes``, are added here. A
    ConfigError ends the process with one line that says what is wrong.
    """
    benchmark = Benchmark(file, how)
    parser = benchmark.parser(**options)
    add_drafters(parser, methods)
    parser.add_argument("--prompts", type=int, default=sizes.prompts, help="how many are asked")
    parser.add_argument("--tokens", type=int, default=sizes.tokens, help="of each")
    asked = parser.parse_args()
    sizes, drafters = Sizes(asked.prompts, asked.tokens), drafters_of(asked, methods)
    own = given if isinstance(given, str) else given(asked)
    command = command_of(benchmark.command(own), drafters, sizes)
    with benchmark.refusing():
        for key, measure in cases(Wanted(sizes, drafters, asked)):
            show(once(benchmark.name, key, sizes, command, measure, how), key)


def once(
    name: str, key: str, sizes: Sizes, command: str, measure: Callable[[], dict[str, Any]], how: str = HOW
) -> dict[str, Any]:
    """The figures stored under ``key`` of a section, measured and stored first unless they are there
    with these sizes."""
    figures, own = kept_figures(name), {"prompts": sizes.prompts, "tokens": sizes.tokens}
    if any(figures.get(key, {}).get(size) != count for size, count in own.items()):
        figures[key] = {**own, **measure()}
        commands = stored(name).commands if path_of(name).exists() else []
        store(name, how, ([*dict.fromkeys([*commands, command])], figures))
    return dict(figures[key])


def add_drafters(parser: argparse.ArgumentParser, methods: Sequence[str]) -> None:
    for method in methods:
        parser.add_argument(flag(method), nargs="+", default=[], metavar="DIR", help=f"folders of {method} drafters")


def drafters_of(options: argparse.Namespace, methods: Sequence[str]) -> dict[str, list[str]]:
    """The folders of drafters that are there, by method; prints those that are missing, and how to get them."""
    return {method: found(method, getattr(options, method)) for method in methods}


def found(method: str, folders: Sequence[str]) -> list[str]:
    if not folders:
        print(f"left out: {method}; name its folder with {flag(method)}", flush=True)
    for folder in folders:
        if not Path(folder).is_dir():
            print(f"missing: {folder} is no folder; penstock train {flag(method)[2:]} makes one", flush=True)
    return [folder for folder in folders if Path(folder).is_dir()]


def flag(method: str) -> str:
    return f"--{method.replace('_', '-')}"


def command_of(command: str, drafters: Mapping[str, Sequence[str]], sizes: Sizes) -> str:
    """A script's command with its drafters and sizes, as shown on the page."""
    named = [f"{flag(method)} {' '.join(map(as_stored, some))}" for method, some in drafters.items() if some]
    return " ".join([command, *named, f"--prompts {sizes.prompts} --tokens {sizes.tokens}"])


def as_stored(folder: str) -> str:
    """A folder relative to the repository's, or its name alone where it is elsewhere."""
    path = Path(folder).resolve()
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name
