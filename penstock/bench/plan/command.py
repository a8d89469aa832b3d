"""``penstock plan``: which devices hold which layers, in which order, and where the drafter runs."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import NamedTuple

from rich.console import Console

from penstock.bench.plan.choices import JUPITER, OURS, Choice, Planning, refusal
from penstock.bench.plan.measured import measured_cluster
from penstock.bench.plan.options import PlanOptions
from penstock.bench.plan.priced import price_of
from penstock.bench.plan.report import as_table, remarks, stages_table, table_of
from penstock.bench.plan.write import cluster_toml
from penstock.bench.profile.hosts import hosts_profile
from penstock.cluster import PRICES, Cluster, load_devices
from penstock.core import ConfigError
from penstock.engine.options import model_folder
from penstock.engine.profile.cluster import cluster_of_hosts
from penstock.hosts.doctor.report import read_report
from penstock.progress import progress_bar


class Outcome(NamedTuple):
    """The chosen plan, and the compared ones, the chosen among them under its own name."""

    chosen: Choice
    compared: list[Choice]


def run_plan(options: PlanOptions, *, as_json: bool = False, console: Console | None = None) -> Outcome:
    """Plan, print, and write the file. Raises ConfigError, with the numbers, where nothing fits."""
    console = console or Console(stderr=True)
    planning = Planning(cluster_to_plan(options, console), options)
    outcome = planned(planning, console)
    if options.output is not None:
        options.output.write_text(cluster_toml(outcome.chosen.cluster), encoding="utf-8")
    more = planning.with_one_more(outcome.chosen)
    if as_json:
        print(json.dumps(table_of(planning, *outcome, more)))
        return outcome
    console.print(stages_table(planning, outcome.chosen))
    console.print(as_table(outcome.compared))
    for line in remarks(planning, outcome.chosen, more):
        console.print(line, highlight=False, markup=False)
    return outcome


def cluster_to_plan(options: PlanOptions, console: Console) -> Cluster:
    """The cluster to plan for, from a file or from measurements of hosts. Raises ConfigError."""
    if options.hosts is not None:
        return cluster_of_hosts(hosts_profile(options, console), drafts=True)
    if options.doctor is None:
        assert options.cluster is not None
        return load_devices(options.cluster, as_model=options.model, bandwidth_gbit_s=options.bandwidth_gbit_s)
    assert options.model is not None
    model = PRICES.get(options.model) or price_of(model_folder(options.model, "target"))
    return measured_cluster(read_report(options.doctor), model)


def planned(planning: Planning, console: Console) -> Outcome:
    """Judge all candidates and choose the best. Plans made by hand are candidates, so ours is never worse."""
    by_hand = list(planning.by_hand())
    if planning.options.method == "jupiter":
        paper = next((choice for choice in by_hand if choice.name == JUPITER), None)
        if paper is None:
            raise ConfigError(f"{refusal(planning)}; or let --method penstock leave devices out and reorder them")
        return Outcome(planning.judged(paper), [planning.judged(choice) for choice in by_hand])
    ours = planning.ours()
    if not ours:
        raise refusal(planning)
    judged = judged_all(planning, [*by_hand, *ours], console)
    goal = planning.options.goal
    best = max(judged, key=lambda choice: choice.value(goal))
    if planning.options.tokens:
        best = planning.elsewhere(best)
    best = replace(best, name=OURS)
    return Outcome(best, [best, *judged[: len(by_hand)]])


def judged_all(planning: Planning, choices: list[Choice], console: Console) -> list[Choice]:
    """Simulate each choice under a progress bar; choices with the same stages are simulated once."""
    known: dict[object, Choice] = {}
    with progress_bar(console) as progress:
        task = progress.add_task("", total=len(choices))
        for choice in choices:
            progress.update(task, description=f"{choice.name}, {len(choice.plan.parts)} stages")
            if choice.plan.parts not in known:
                known[choice.plan.parts] = planning.judged(choice)
            progress.advance(task)
    return [replace(known[choice.plan.parts], name=choice.name) for choice in choices]
