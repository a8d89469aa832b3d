"""``penstock simulate``: compares strategies on modelled devices in virtual time, without any model."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from importlib.metadata import version
from typing import Any

from rich.console import Console
from rich.markup import escape

from penstock.bench.entries import PLACED, PLAIN, is_plain, parse_entries
from penstock.bench.grid import WARM_UP
from penstock.bench.intervals import CONFIDENCE
from penstock.bench.looping import is_looping
from penstock.bench.recordings.load import load_recordings
from penstock.bench.report import prepare
from penstock.bench.simulate.options import SimulateOptions
from penstock.bench.simulate.report import as_json, write_report
from penstock.bench.simulate.runs import Case, SimulatedRun, summarise, tables_of
from penstock.bench.simulate.sweep import STAGES, Settings, expanded
from penstock.cluster import Cluster, load_cluster
from penstock.cluster.uniform import uniform_cluster
from penstock.core import ConfigError
from penstock.extras import PLOTS, require
from penstock.progress import progress_bar
from penstock.recording import Recording
from penstock.simulator.clusters import check_drafter, modelled_cluster
from penstock.simulator.run import Simulated, simulate
from penstock.simulator.script import DEMO_ACCURACY, Script, profile_script, recording_script


@dataclass(frozen=True)
class Plan:
    """The simulations that the options describe: ``cases`` by cluster, plain decoding first on each."""

    script: Script
    cases: list[list[Case]]


def run_simulate(options: SimulateOptions, console: Console | None = None) -> list[SimulatedRun]:
    """Simulate, print the tables, write JSON file and report. Raises ConfigError before anything starts."""
    plan = plan_of(options)
    if options.report is not None:
        require([PLOTS])
        prepare(options.report)
    console = console or Console(stderr=True)
    runs = simulate_all(plan, console, options.overhead_per_hop_ms / 1e3)
    said = remarks(options, plan.script)
    for table in tables_of(runs):
        console.print(table)
    for line in said:
        console.print(line, highlight=False, markup=False)
    settings = settings_of(options)
    if options.json is not None:
        options.json.write_text(as_json(settings, plan.script.label, runs), encoding="utf-8")
    if options.report is not None:
        write_report(options.report, settings, plan.script.label, options.sweep, runs, said)
    return runs


def simulate_all(plan: Plan, console: Console, overhead_per_hop: float) -> list[SimulatedRun]:
    """Simulate every case under a progress bar. ``overhead_per_hop``: seconds, see ``simulate``."""
    runs = []
    with progress_bar(console) as progress:
        task = progress.add_task("", total=sum(map(len, plan.cases)))
        for cases in plan.cases:
            plain: list[Simulated] = []
            for case in cases:
                progress.update(task, description=escape(f"{case.cluster.name}: {case.strategy}"))
                found = simulate(case.cluster, plan.script, case.config, WARM_UP, overhead_per_hop)
                plain = plain or found
                runs.append(summarise(case, found, plain))
                progress.advance(task)
    return runs


# --------------------------------------------------------------------------------------------------------------- plan


def plan_of(options: SimulateOptions) -> Plan:
    """The cases to simulate. Raises ConfigError, naming the field, for everything that cannot be simulated."""
    swept = expanded(options.strategies, options.sweep)
    configs = [None if is_plain(config) else config for _, config in parse_entries([text for _, text, _ in swept], {})]
    entries = [(*names, config) for names, config in zip(swept, configs, strict=True)]
    entries.sort(key=lambda entry: entry[-1] is not None)  # plain decoding first: the others are compared with it
    if entries[0][-1] is not None:
        entries.insert(0, (PLAIN, PLAIN, {}, None))
    places = options.drafter_on or ("",)
    clusters = [
        (f"{name}{PLACED}{place}" if place else name, *found)
        for name in options.clusters
        for place in places
        for found in clusters_of(name, options, place)
    ]
    if any(configs):
        for _, cluster, _ in clusters:
            check_drafter(cluster)
    cases = [
        [Case(name, cluster, base, text, config, {**stages, **own}) for base, text, own, config in entries]
        for name, cluster, stages in clusters
    ]
    return Plan(script_of(options), cases)


def clusters_of(name: str, options: SimulateOptions, place: str) -> Iterator[tuple[Cluster, Settings]]:
    """The named cluster with the drafter in its place.

    Where stages are swept: a cluster of its kind for each number of stages, with that number.
    """
    changes: dict[str, Any] = {"bandwidth_gbit_s": options.bandwidth_gbit_s, "drafter_on": place or None}
    drawn = re.fullmatch(r"random-(\d+)(:\d+)?", name)
    cluster = modelled_cluster(name, **changes)
    if STAGES not in options.sweep:
        yield cluster, {}
    for stages in options.sweep.get(STAGES, ()):
        alike = load_cluster(f"random-{drawn[1]}:{stages}", **changes) if drawn else uniform_cluster(cluster, stages)
        yield alike, {STAGES: stages}


def script_of(options: SimulateOptions) -> Script:
    """The script from the recordings if there are any, else from a profile. Raises ConfigError naming
    file and field."""
    if options.recordings:
        return recorded(options)
    requests = options.tokens // options.tokens_per_request
    accuracy = options.accuracy or DEMO_ACCURACY
    return profile_script(accuracy, requests, options.tokens_per_request, options.seed)


def recorded(options: SimulateOptions) -> Script:
    """A script of as many whole requests as fit in ``tokens``, at least one. Requests that loop or have only one token
    are left out."""
    recordings = load_recordings(options.recordings, options.model, options.draft_model)
    for path, recording in zip(options.recordings, recordings, strict=True):
        recording.check_made_with(path, recordings[0].header.target, recordings[0].header.draft)
    straight = [(recording, request) for recording in recordings for request in straight_requests(recording)]
    chosen: list[tuple[Recording, int]] = []
    tokens = 0
    for recording, request in straight:
        rows = recording.rows(request)
        tokens += min(rows.stop - rows.start, options.tokens_per_request)
        if chosen and tokens > options.tokens:
            break
        chosen.append((recording, request))
    if not chosen:
        names = ", ".join(str(path) for path in options.recordings)
        raise ConfigError(f"{names}: tokens: none is left without outputs that loop; record longer or sampled ones")
    label = f"recording {', '.join(path.name for path in options.recordings)}"
    return recording_script(chosen, options.tokens_per_request, label)


def straight_requests(recording: Recording) -> list[int]:
    """Requests whose outputs have a second token and do not loop, which would flatter every drafter."""
    outputs = {i: recording.tokens[recording.rows(i)].tolist() for i in range(recording.requests)}
    return [i for i, tokens in outputs.items() if len(tokens) > 1 and not is_looping(tokens)]


# -------------------------------------------------------------------------------------------------------------- words


def remarks(options: SimulateOptions, script: Script) -> list[str]:
    """Remarks that a reader needs before quoting the tables."""
    source = " (the demo pair's at T = 1)" if not options.recordings and options.accuracy is None else ""
    lines = [
        f"Simulated: the engine's own decisions in virtual time; {script.label}{source}; "
        f"{script.tokens} tokens in {len(script.picks)} requests.",
        f"Speed-ups are geometric means over pairs of the same request; {CONFIDENCE:.0%} bounds: Student's t of their "
        "logarithms.",
        "Off the target's path a draft is any of those on it.",
    ]
    if options.overhead_per_hop_ms:
        lines.append(f"Every message takes {options.overhead_per_hop_ms:g} ms beyond its link's time.")
    if STAGES in options.sweep:
        lines.append(stages_remark(options.clusters))
    return lines


def stages_remark(clusters: Sequence[str]) -> str:
    if all(name.startswith("random-") for name in clusters):
        return "Stages swept: each number is a cluster of its own drawn from the seed."
    return "Stages swept: each is like the cluster's first, with as many layers, so that the model grows with them."


def settings_of(options: SimulateOptions) -> dict[str, Any]:
    """Everything needed to repeat the run."""
    shown = {one.name: getattr(options, one.name) for one in fields(options)}
    del shown["json"], shown["report"]
    shown["recordings"] = [path.name for path in options.recordings]
    shown["accuracy"] = None if options.recordings else options.accuracy or DEMO_ACCURACY
    return {**shown, "versions": {"penstock": version("penstock")}}
