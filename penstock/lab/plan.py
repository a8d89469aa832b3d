"""``penstock plan``: the papers' cost models beside it, the report of a plan, and the command itself."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final, NamedTuple

from rich.console import Console

from penstock.cluster import PRICES, Cluster, load_devices
from penstock.cluster.load import ON_LAST
from penstock.cluster.spec import Device, Link, ModelPrice, Stage
from penstock.cluster.timing import DeviceTiming, Held, chunk, device_timing, held_by, held_by_part
from penstock.core import ConfigError
from penstock.engine.options import model_folder
from penstock.engine.profile.hosts import cluster_of_hosts
from penstock.files import naming
from penstock.hosts.probe import read_report
from penstock.lab.plan_choices import (
    JUPITER,
    OURS,
    Choice,
    Planning,
    PlanOptions,
    cluster_toml,
    measured_cluster,
    price_of,
    refusal,
)
from penstock.lab.profile import hosts_profile
from penstock.lab.report import Report, consoles
from penstock.terminal import FiguresTable, progress_bar

# --------------------------------------------------------------------------------------------------------------- papers
# Cost models of other ways to spread one sequence over devices: sequence and tensor parallelism, and their kin.
#
# Jupiter (Ye et al.) compares itself with them. Each splits every layer over all devices, which then have to exchange
# hidden states in every layer. The numbers of hidden states exchanged are those of its Table I, and for DT and Galaxy
# those of its section VI-A.
#
# - SP: sequence parallelism. A replica of the model on every device, and an equal part of the prompt; two all-gathers a
#   layer. Decodes on one device.
# - M-LM: Megatron's tensor parallelism (Shoeybi et al.). Equal shares of every layer; two all-reduces a layer.
# - DT: M-LM with half of the layers decoupled, which exchange nothing.
# - Galaxy: M-LM's bytes; shares follow the devices' speeds, and exchanges overlap with computing.


@dataclass(frozen=True, kw_only=True)
class Method:
    """One way to split layers over devices.

    ``elements``: hidden states exchanged per layer and token (Table I), each gathered in a round of its own.
    ``replicas``: whether every device has the whole model. ``by_speed``: whether shares are in proportion to memory
    bandwidths, rather than equal. ``overlaps``: whether exchanges overlap with computing.
    """

    elements: float
    replicas: bool = False
    by_speed: bool = False
    overlaps: bool = False


METHODS: Final = {
    "SP": Method(elements=2, replicas=True),
    "M-LM": Method(elements=4),
    "DT": Method(elements=2),
    "Galaxy": Method(elements=4, by_speed=True, overlaps=True),
}
"""The methods by the names that the paper gives them."""


USABLE: Final = 0.9
"""Share of a device's memory, 0 to 1, that the model may use. The rest is the system's and torch's; vLLM's
``gpu_memory_utilization`` has the same default."""


class Times(NamedTuple):
    """Seconds of computing, and of exchanging hidden states. ``overlaps``: whether both go on at the same time."""

    computing: float
    exchanging: float
    overlaps: bool = False

    @property
    def total(self) -> float:
        return max(self[:2]) if self.overlaps else self.computing + self.exchanging


@dataclass(frozen=True, kw_only=True)
class Group:
    """Devices that all work on every layer, each on the share that the method gives it.

    ``rings``: whether to count the traffic that really crosses a device's link. A ring gathers with (N - 1) / N of the
    elements in N - 1 messages; an all-reduce, whose elements Table I counts twice, is two such rounds. Without
    ``rings`` the elements of Table I count as they are, and latency does not.
    """

    devices: Sequence[Device]
    model: ModelPrice
    link: Link
    rings: bool
    kv_slots: int

    def pass_times(self, method: Method, rows: int, cached: int) -> Times:
        """Seconds of a pass over ``rows`` tokens that follow ``cached`` ones."""
        # A single row cannot be divided among replicas: the fastest of them decodes alone.
        if method.replicas and rows == 1:
            return Times(min(self._whole(device).seconds(1, chunk(1, cached)) for device in self.devices), 0.0)
        computing = [self._share_seconds(method, n, rows, cached) for n in range(len(self.devices))]
        return Times(max(computing), self.exchanging_s(method, rows), method.overlaps)

    def exchanging_s(self, method: Method, rows: int) -> float:
        """Seconds in which the devices exchange hidden states for ``rows`` tokens."""
        others = len(self.devices) - 1
        if not others:
            return 0.0
        elements = method.elements * self.model.layers * self.model.hidden_size * rows
        seconds = elements * self.model.activation_bytes * 8 / (self.link.bandwidth_gbit_s * 1e9)
        if not self.rings:
            return seconds
        latency = method.elements * others * self.model.layers * self.link.latency_ms / 1e3
        return seconds * others / len(self.devices) + latency

    def held(self, method: Method, index: int) -> Held:
        """Bytes that the device ``index`` has to hold: the model, or its share of it and the whole embedding."""
        whole = held_by(self.model, self.model.all_layers, self.kv_slots, embedding=True, head=True)
        if method.replicas:
            return whole
        share = self._share(method, index)
        weights = (whole.weights - self.model.embedding_bytes) * share + self.model.embedding_bytes
        return Held(weights, whole.cache * share, whole.activations)

    def lacking(self, method: Method) -> list[str]:
        """Names of the devices whose usable memory is too small."""
        return [
            device.name
            for i, device in enumerate(self.devices)
            if device.memory_gb is not None and self.held(method, i).total > USABLE * device.memory_gb * 1e9
        ]

    def _share(self, method: Method, index: int) -> float:
        """The share of every layer, 0 to 1, that the device ``index`` computes."""
        if not method.by_speed:
            return 1 / len(self.devices)
        rates = [device.weight_bandwidth_gb_s or 0.0 for device in self.devices]
        return rates[index] / sum(rates)

    def _whole(self, device: Device) -> DeviceTiming:
        """The times of the whole model on one device."""
        return device_timing(device, self.model, self.model.all_layers, 1.0, head=True)

    def _share_seconds(self, method: Method, index: int, rows: int, cached: int) -> float:
        """Seconds of a device's share: a replica computes some rows with all weights, a shard all rows with some."""
        timing, share, seen = self._whole(self.devices[index]), self._share(method, index), chunk(rows, cached)
        reads = 1.0 if method.replicas else share
        part = DeviceTiming(
            fixed_s=timing.fixed_s,
            weight_s=timing.weight_s * reads,
            row_s=timing.row_s * share,
            pair_s=timing.pair_s * share,
            slot_s=timing.slot_s * reads,
        )
        return part.seconds(rows, seen)


def sequence_s(group: Group, method: Method, prompt: int, tokens: int) -> tuple[float, float]:
    """Seconds of the prompt, and seconds of the tokens that are decoded after it, one by one."""
    decoding = (group.pass_times(method, 1, prompt + done).total for done in range(tokens))
    return group.pass_times(method, prompt, 0).total, sum(decoding)


# --------------------------------------------------------------------------------------------------------------- report
# Tables and JSON of a plan, its bottleneck, and the plans with which it was compared.

NAMED: Final = 8
"""Most devices that a line names."""
WORTH: Final = 1.005
"""Smallest ratio of a new figure to an old one, or the reverse, that is worth a sentence."""
GOAL_FIGURES: Final = {
    "latency": ("answer_s", "an answer in {} s"),
    "throughput": ("served_tokens_per_second", "{} tokens/s"),
    "ttft": ("first_token_ms", "the first token after {} ms"),
}
"""The figure that each goal counts, and its words."""
HEADINGS: Final = {
    "slowest_stage_ms": "slowest, ms",
    "answer_s": "answer, s",
    "tokens_per_second": "tokens/s",
    "served_tokens_per_second": "served/s",
    "first_token_ms": "first token, ms",
    "trip_ms": "trip, ms",
}
"""Headings of the figures in the table of compared plans."""


class PlanOutcome(NamedTuple):
    """The chosen plan, and the compared ones; the first of these is the chosen one under Penstock's name."""

    chosen: Choice
    compared: list[Choice]


def report_of(planning: Planning, outcome: PlanOutcome, more: Choice | None) -> Report:
    """The report of a planning. ``more``: the plan with one device more, if one could be made."""
    chosen, compared = outcome
    tables = [stages_table(planning, chosen), as_table(compared)]
    return Report(table_of(planning, chosen, compared, more), tables, [*remarks(planning, chosen, more)])


def report_of_engines(options: PlanOptions, each: Sequence[tuple[PlanOutcome, Report]]) -> Report:
    """The reports of several engines in one, and how to run them together."""
    lines: list[str] = []
    for number, (_, report) in enumerate(each):
        lines += (f"Engine {number}: {line}" for line in report.remarks)
    lines.append(f"Run all with --data-parallel-size {len(each)} --hosts {options.hosts} --layer-split auto")
    document = {"engines": [report.document for _, report in each], "hosts": options.hosts, "layer_split": "auto"}
    return Report(document, [table for _, report in each for table in report.tables], lines)


def table_of(planning: Planning, chosen: Choice, compared: Sequence[Choice], more: Choice | None) -> dict[str, Any]:
    """The figures of a plan as a document; None for a figure that was not simulated, or holds for no device.

    ``more``: the plan with one device more.
    """
    stages = chosen.cluster.stages
    return {
        "stages": [stage_entry(stage) for stage in stages],
        "drafter": chosen.cluster.drafter,
        "engine": chosen.cluster.engine,
        "left_out": left_out(planning, chosen),
        **(run_with(chosen) if planning.options.real else {}),
        **figures(chosen),
        "least_slowest_stage_ms": 1e3 * planning.alone.least_slowest_s,
        "limited_by": limit(planning, chosen),
        "one_more": more and {"device": more.name, **figures(more)},
        "compared": {choice.name: {"layers": layers_by_device(choice), **figures(choice)} for choice in compared[1:]},
    }


def stage_entry(stage: Stage) -> dict[str, Any]:
    """A stage as JSON; ``device`` is the one that leads the ranks of a tensor parallel group."""
    ranks = {"ranks": list(stage.devices)} if stage.tensor_parallel else {}
    return {"device": stage.devices[0], "layers": sum(stage.layers), **ranks}


def run_with(chosen: Choice) -> dict[str, str]:
    """The options with which the plan runs on real hosts."""
    stages = chosen.cluster.stages
    return {
        "hosts": ",".join(chosen.cluster.device(stage.devices[0]).host for stage in stages),
        "layer_split": ",".join(str(sum(stage.layers)) for stage in stages),
        **({"drafter_on": ON_LAST} if chosen.cluster.drafter == stages[-1].last_device else {}),
    }


def figures(choice: Choice) -> dict[str, float | None]:
    """The figures of a plan, by name; None for those that were not simulated."""
    speed = choice.speed
    return {
        "slowest_stage_ms": 1e3 * choice.plan.slowest_s,
        "trip_ms": 1e3 * choice.plan.trip_s,
        "tokens_per_second": None if speed is None else speed.tokens_per_second,
        "served_tokens_per_second": None if speed is None else speed.served_per_second,
        "first_token_ms": None if speed is None else 1e3 * speed.first_token_s,
        "answer_s": None if speed is None else speed.answer_s,
    }


def layers_by_device(choice: Choice) -> dict[str, int]:
    """The number of layers of each stage, by the names of its devices."""
    return {" + ".join(stage.devices): sum(stage.layers) for stage in choice.cluster.stages}


def left_out(planning: Planning, chosen: Choice) -> list[str]:
    """Names of the devices that hold no layers."""
    used = {name for stage in chosen.cluster.stages for name in stage.devices}
    return [device.name for device in planning.devices if device.name not in used]


def some_of(names: Sequence[str]) -> str:
    """All names if they are few, else the first ones and how many more there are."""
    if len(names) <= NAMED:
        return ", ".join(names)
    return f"{', '.join(names[: NAMED - 1])} and {len(names) - NAMED + 1} others"


def stage_seconds(planning: Planning, chosen: Choice) -> Iterator[tuple[str, range, float]]:
    """(name of the device or group, its layers, seconds of a batch) of each stage."""
    done = 0
    for part in chosen.plan.parts:
        layers = range(done, done + part.layers)
        yield planning.names[part.device], layers, float(planning.problem.stage_s[part.device, done, layers.stop])
        done = layers.stop


def link_seconds(planning: Planning, chosen: Choice) -> Iterator[tuple[str, float]]:
    """(its ends in words, seconds for which a batch occupies it) of each link on a batch's way."""
    problem, names, parts = planning.problem, planning.names, chosen.plan.parts
    first, last = parts[0].device, parts[-1].device
    yield f"engine to {names[first]}", float(problem.enter_busy_s[first])
    for one, two in pairwise(parts):
        yield f"{names[one.device]} to {names[two.device]}", float(problem.hop_busy_s[one.device, two.device])
    yield f"{names[last]} to engine", float(problem.leave_busy_s[last])


def limit(planning: Planning, chosen: Choice) -> str:
    """The slowest stage or link in words: batches cannot follow each other faster than it takes them."""
    stages = ((f"stage {i}, {name}", s) for i, (name, _, s) in enumerate(stage_seconds(planning, chosen), 1))
    links = ((f"the link {ends}", s) for ends, s in link_seconds(planning, chosen))
    return max([*stages, *links], key=lambda one: one[1])[0]


def stages_table(planning: Planning, chosen: Choice) -> FiguresTable:
    """Each device's layers, milliseconds per batch, and gigabytes held, beside those that it has."""
    cluster, model = chosen.cluster, chosen.cluster.as_model
    assert model is not None
    title = f"{cluster.name}: {planning.batch.rows} rows a batch"
    table = FiguresTable("stage", "layers", "ms", "holds, GB", "of GB", title=title)
    rows = list(stage_seconds(planning, chosen))
    for i, (name, layers, seconds) in enumerate(rows):
        group = planning.groups[chosen.plan.parts[i].device]
        embedding, head = i == 0, i == len(rows) - 1
        each = held_by_part(model, group, layers, cluster.kv_slots, embedding=embedding, head=head)
        for rank, (device, held) in enumerate(zip(group, each, strict=True)):
            if device.name == cluster.drafter and (draft := cluster.draft_as_model) is not None:
                held += held_by(draft, draft.all_layers, cluster.kv_slots, embedding=True, head=True)
            has = "?" if device.memory_gb is None else f"{round(device.memory_gb, 2):g}"
            # A group has a line for each rank, and its layers and its time in the first one.
            shown = (device.name, "", "") if rank else (name, str(len(layers)), f"{1e3 * seconds:.1f}")
            table.add_row(*shown, f"{held.total / 1e9:.2f}", has)
    return table


def as_table(compared: Sequence[Choice]) -> FiguresTable:
    """The compared plans side by side."""
    rows = [figures(choice) for choice in compared]
    there = [name for name in HEADINGS if any(row[name] is not None for row in rows)]
    table = FiguresTable("plan", "stages", *(HEADINGS[name] for name in there))
    for choice, row in zip(compared, rows, strict=True):
        table.add_row(choice.name, str(len(choice.plan.parts)), *(f"{row[name]:.4g}" for name in there))
    return table


def brought(goal: str, chosen: Choice, more: Choice) -> str:
    """A sentence about one more device: how it would change the figure that the goal counts."""
    name, unit = GOAL_FIGURES[goal] if chosen.speed is not None else ("slowest_stage_ms", "a slowest stage of {} ms")
    now, then = figures(chosen)[name], figures(more)[name]
    assert now is not None
    assert then is not None
    if max(now / then, then / now) < WORTH or more.value(goal) <= chosen.value(goal):
        return f"One more like {more.name} would bring nothing."
    return f"One more like {more.name}: {unit.format(f'{then:.4g}')} in place of {now:.4g}."


def remarks(planning: Planning, chosen: Choice, more: Choice | None) -> Iterator[str]:
    """Sentences about the plan's bottleneck, the bound of all plans, and what would help."""
    slowest = 1e3 * chosen.plan.slowest_s
    yield f"Limited by {limit(planning, chosen)}: {slowest:.1f} ms a batch."
    # The bound of single devices holds for groups, too: ranks together are at most as fast as each by itself.
    yield (
        f"No plan's slowest stage is faster than {1e3 * planning.alone.least_slowest_s:.1f} ms: layers cut anywhere, "
        "links free."
    )
    if any(stage.tensor_parallel for stage in chosen.cluster.stages):
        yield "Devices joined by + are the tensor parallel ranks of one stage, which share every layer of it."
    if (out := left_out(planning, chosen)) or chosen.cluster.drafter is not None:
        drafter = f"The drafter runs on {chosen.cluster.drafter}" if chosen.cluster.drafter else "Nothing drafts"
        yield f"{drafter}, the engine on {chosen.cluster.engine}" + (f"; left out: {some_of(out)}." if out else ".")
    if more is not None:
        yield brought(planning.options.goal, chosen, more)
    if planning.options.real:
        given = run_with(chosen)
        drafting = f" --drafter-on {given['drafter_on']}" if "drafter_on" in given else ""
        yield f"Run it with --hosts {given['hosts']} --layer-split {given['layer_split']}{drafting}"
    if planning.options.tokens:
        drafter = "like the demo pair's" if planning.options.accuracy is None else "as often right as --accuracy says"
        yield (
            f"Judged by simulating the engine with a drafter {drafter}."
            if chosen.cluster.drafter is not None
            else "Judged by simulating the engine; without a drafter it decodes plainly."
        )


# -------------------------------------------------------------------------------------------------------------- command
# ``penstock plan``: which devices hold which layers, in which order, and where the drafter runs.


def run_plan(options: PlanOptions, *, as_json: bool = False, console: Console | None = None) -> list[PlanOutcome]:
    """Plan for each engine, print, and write the file. Raises ConfigError, with the numbers, if nothing fits."""
    console, out = consoles(console)
    each = [plan_engine(one, console) for one in options.each_engine()]
    report = each[0][1] if len(each) == 1 else report_of_engines(options, each)
    report.answer(out, sys.stdout if as_json else None)
    return [outcome for outcome, _ in each]


def plan_engine(options: PlanOptions, console: Console) -> tuple[PlanOutcome, Report]:
    """One engine's plan and its report; the plan is written to the file, if one is named.

    Raises ConfigError where the cluster cannot be loaded or measured, and where the model fits in no way.
    """
    planning = Planning(cluster_to_plan(options, console), options)
    outcome = planned(planning, console)
    planning = planning.with_groups(outcome.chosen.groups)
    if options.output is not None:
        with naming(options.output):
            options.output.write_text(cluster_toml(outcome.chosen.cluster), encoding="utf-8")
    more = planning.with_one_more(outcome.chosen)
    return outcome, report_of(planning, outcome, more)


def cluster_to_plan(options: PlanOptions, console: Console) -> Cluster:
    """The cluster to plan for, from a file or from measured hosts.

    Raises ConfigError for a file that cannot be used, and for hosts that cannot be reached.
    """
    if options.hosts is not None:
        return cluster_of_hosts(hosts_profile(options, console), drafts=True)
    if options.doctor is None:
        assert options.cluster is not None
        return load_devices(options.cluster, as_model=options.model, bandwidth_gbit_s=options.bandwidth_gbit_s)
    assert options.model is not None
    model = PRICES.get(options.model) or price_of(model_folder(options.model, "target"))
    return measured_cluster(read_report(options.doctor), model)


def planned(planning: Planning, console: Console) -> PlanOutcome:
    """Judge all candidates and choose the best one. Plans made by hand are candidates, too: none of them is better."""
    by_hand = list(planning.by_hand())
    if planning.options.method == "jupiter":
        paper = next((choice for choice in by_hand if choice.name == JUPITER), None)
        if paper is None:
            raise ConfigError(f"{refusal(planning)}; or let --method penstock leave devices out and reorder them")
        return PlanOutcome(planning.judged(paper), [planning.judged(choice) for choice in by_hand])
    ours = [choice for one in (planning, *planning.joined()) for choice in one.ours()]
    if not ours:
        raise refusal(planning)
    judged = judged_all(planning, [*by_hand, *ours], console)
    goal = planning.options.goal
    best = max(judged, key=lambda choice: choice.value(goal))
    if planning.options.tokens:
        best = planning.elsewhere(best)
    best = replace(best, name=OURS)
    return PlanOutcome(best, [best, *judged[: len(by_hand)]])


def judged_all(planning: Planning, choices: list[Choice], console: Console) -> list[Choice]:
    """Simulate each choice, with a progress bar; choices with the same stages are simulated once."""
    known: dict[object, Choice] = {}
    with progress_bar(console) as progress:
        task = progress.add_task("", total=len(choices))
        for choice in choices:
            progress.update(task, description=f"{choice.name}, {len(choice.plan.parts)} stages")
            if choice.cluster.stages not in known:
                known[choice.cluster.stages] = planning.judged(choice)
            progress.advance(task)
    return [replace(known[choice.cluster.stages], name=choice.name) for choice in choices]
