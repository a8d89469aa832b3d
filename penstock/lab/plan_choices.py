"""The plans that ``penstock plan`` compares: its options, the choices, their prices, and the judge."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Annotated, Any, Final

import tomli_w

from penstock.checkpoint.gguf_header import Header, read_header
from penstock.checkpoint.look import resolve, stated_config
from penstock.cluster.drawn import split_by_speed
from penstock.cluster.load import ClusterFile, cluster_of, preset_names, spread, with_drafter_on
from penstock.cluster.spec import LAYERS, TENSORS, Cluster, ModelPrice, Stage, eagle, llama
from penstock.config import MODEL, OUTPUT, PIPELINE, FieldError, Option, check, known_name, parse
from penstock.core import ConfigError
from penstock.drafters.base import check_accuracy
from penstock.engine.options import options_of_replicas
from penstock.hosts.probe import DeviceRates, DoctorReport, ExaminedHost, LinkRates
from penstock.lab.grid import WARM_UP, Accuracy, Bandwidth, check_written
from penstock.lab.profile import HostsOptions
from penstock.lab.script import DEMO_ACCURACY, MOST_TOKENS, Script, profile_script
from penstock.lab.simulator import simulate, simulate_serving
from penstock.planner.costs import Batch, Group, candidates, grouped_problem, groupings, shortage
from penstock.planner.partition import Part, Plan, Problem, front, layer_split, plan_of
from penstock.speculation import SpeculativeConfig

# -------------------------------------------------------------------------------------------------------------- options
# The options of ``penstock plan``.

GOALS: Final = ("latency", "throughput", "ttft")
METHODS: Final = ("penstock", "jupiter")
"""Values of the options ``goal`` and ``method``."""


@dataclass(frozen=True, kw_only=True)
class PlanOptions(HostsOptions):
    """The devices, the model, the goal, and how plans are judged.

    Raises FieldError for a value out of range, and options that exclude each other.
    """

    cluster: Annotated[
        str | None,
        Option(
            "Preset, random-SEED[:STAGES], or a file ending in .toml.",
            PIPELINE,
            default="",
            values=tuple(preset_names()),
        ),
    ] = None
    doctor: Annotated[
        Path | None,
        Option(
            "Plan for real hosts: what 'penstock doctor --json' has printed of them.",
            PIPELINE,
            metavar="FILE.json",
            default="",
        ),
    ] = None
    model: Annotated[
        str | None,
        Option(
            "A priced model's name, in place of the cluster's as_model; of real hosts the checkpoint.",
            MODEL,
            default="the cluster's",
        ),
    ] = None
    goal: Annotated[
        str,
        Option(
            "latency: the whole answer of one request soonest; throughput: most tokens per second of many at a time; "
            "ttft: the first token soonest.",
            PIPELINE,
        ),
    ] = "latency"
    method: Annotated[
        str,
        Option("penstock: chooses devices and their order; jupiter: the paper's, all in the file's order.", PIPELINE),
    ] = "penstock"
    prompt_tokens: Annotated[int, Option("Tokens of the prompt that is simulated.", PIPELINE)] = 128
    tokens: Annotated[
        int, Option("Tokens that each plan is simulated for; 0 judges by the slowest stage alone.", PIPELINE)
    ] = 64
    accuracy: Accuracy = None
    bandwidth_gbit_s: Bandwidth = None
    data_parallel_size: Annotated[
        int,
        Option(
            "Engines, each planned for its part of --hosts, which is cut in order as `serve` cuts it.",
            PIPELINE,
            names=("--data-parallel-size", "-dp"),
        ),
    ] = 1
    output: Annotated[
        Path | None,
        Option("Write the cluster file with the plan's stages.", OUTPUT, names=("--output", "-o"), metavar="FILE.toml"),
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if [self.cluster, self.doctor, self.hosts].count(None) != 2:
            raise FieldError("cluster", "or hosts or doctor has to be given, and only one of them: what is planned for")
        if self.hosts is None:
            self.check_unmeasured("a cluster" if self.doctor is None else "doctor's report")
        if self.real:
            check(self.model is not None, "model", None, "the checkpoint that the hosts are to run")
            check(self.bandwidth_gbit_s is None, "bandwidth_gbit_s", self.bandwidth_gbit_s, "left out: links are real")
            check(self.output is None, "output", str(self.output), "left out: the plan of real hosts is two options")
        known_name(self.goal, GOALS, "goal")
        known_name(self.method, METHODS, "method")
        for name, least in (("prompt_tokens", 1), ("tokens", 2)):
            count = getattr(self, name)
            wanted = f"{'0, or ' if name == 'tokens' else ''}{least} to {MOST_TOKENS:,}"
            check(least <= count <= MOST_TOKENS or (name == "tokens" and count == 0), name, count, wanted)
        if self.accuracy is not None:
            check_accuracy(self.accuracy)
        if self.output is not None:
            check(self.output.suffix == ".toml", "output", str(self.output), "a file that ends in .toml")
        check_written(self, "output")
        check(self.data_parallel_size >= 1, "data_parallel_size", self.data_parallel_size, "at least 1")
        if self.hosts is not None:
            self.each_engine()  # raises FieldError where the hosts cannot be divided
        elif self.data_parallel_size > 1:
            problem = f"is {self.data_parallel_size}, and only hosts are divided among engines"
            raise FieldError(
                "data_parallel_size", f"{problem}: give hosts, or plan each engine's devices by themselves"
            )

    def each_engine(self) -> list[PlanOptions]:
        """The options of each engine's plan, which differ in the hosts.

        Raises FieldError where the hosts cannot be divided among the engines.
        """
        if self.hosts is None or self.data_parallel_size == 1:
            return [self]
        engines = options_of_replicas(replace(self.engine_options(), data_parallel_size=self.data_parallel_size))
        return [replace(self, hosts=one.hosts, data_parallel_size=1) for one in engines]

    @property
    def real(self) -> bool:
        """Whether the plan is for real hosts."""
        return self.cluster is None


# ---------------------------------------------------------------------------------------------------------------- judge
# Judges a plan by simulating the engine's own decisions on its stages, in virtual time.

REQUESTS: Final = 2
"""Requests that are simulated for latency, one after another. More give steadier figures, and take longer for every
plan."""
SEED: Final = 1
"""Seed of the drafter's hits and misses, the same for all plans."""
AT_A_TIME: Final = 2
"""Requests per stage that are simulated together for throughput. With one, stages idle whenever a request waits for its
own token."""


@dataclass(frozen=True, kw_only=True)
class Speed:
    """The result of a simulation.

    ``tokens_per_second``: of one request, after its first token. ``first_token_s``: seconds to the first token.
    ``answer_s``: seconds of a whole request, its prompt included. ``served_per_second``: tokens per second of all
    requests that ran together; None if none did.
    """

    tokens_per_second: float
    first_token_s: float
    answer_s: float
    served_per_second: float | None = None


def staged(cluster: Cluster, groups: Sequence[Group], parts: tuple[Part, ...]) -> Cluster:
    """The cluster with a stage for each part; ``part.device`` is the index of a group."""
    return replace(cluster, stages=tuple(stage_of(groups[part.device], part.layers) for part in parts))


def stage_of(group: Group, layers: int) -> Stage:
    """The stage of a group, whose devices are ranks if there are several."""
    names = tuple(device.name for device in group)
    return Stage(devices=names, layers=(layers,), split=TENSORS if len(names) > 1 else LAYERS)


def simulated(cluster: Cluster, options: PlanOptions) -> Speed:
    """Simulate ``auto``; plain decoding if the cluster names no drafter."""
    config = SpeculativeConfig(strategy="auto") if cluster.drafter is not None else None
    runs = simulate(cluster, script_of(REQUESTS, options), config, min(WARM_UP, options.tokens))
    serving = options.goal == "throughput"
    return Speed(
        tokens_per_second=sum(run.tokens - 1 for run in runs) / sum(run.seconds for run in runs),
        first_token_s=sum(run.first_token_seconds for run in runs) / len(runs),
        answer_s=sum(run.first_token_seconds + run.seconds for run in runs) / len(runs),
        served_per_second=served_per_second(cluster, config, options) if serving else None,
    )


def served_per_second(cluster: Cluster, config: SpeculativeConfig | None, options: PlanOptions) -> float:
    """Tokens per second of ``AT_A_TIME`` requests per stage at the same time, from the first request's start."""
    together = AT_A_TIME * len(cluster.stages)
    runs = simulate_serving(cluster, script_of(together, options), config, together)
    return sum(len(run.moments) for run in runs) / max(run.moments[-1] for run in runs)


def script_of(requests: int, options: PlanOptions) -> Script:
    """A script of requests that are all alike."""
    return drawn_script(tuple(options.accuracy or DEMO_ACCURACY), requests, options.tokens, options.prompt_tokens)


@lru_cache(maxsize=16)
def drawn_script(accuracy: tuple[float, ...], requests: int, tokens: int, prompt: int) -> Script:
    """Kept, since plans are compared on the same script: to draw it can take longer than to simulate a plan."""
    return profile_script(accuracy, requests, tokens, SEED, prompt=prompt)


# -------------------------------------------------------------------------------------------------------------- choices
# The plans that are compared: Penstock's, those that people make by hand, and Jupiter's.

PLAIN_BATCH: Final = Batch(rows=1, context=512)
SPECULATIVE_BATCH: Final = Batch(rows=8, context=512)
"""Batches for which stages are balanced: rows (one, or a few with drafted tokens), and the tokens before them. They are
those of ``engine.opening``."""
OURS, EVEN, PROPORTIONAL, JUPITER = "penstock", "even split", "in proportion to speed", "jupiter"
"""The names of the plans."""


@dataclass(frozen=True)
class Choice:
    """A plan under a name. Its parts name ``groups`` by index. ``speed`` is None if the plan was not simulated."""

    name: str
    plan: Plan
    cluster: Cluster
    groups: tuple[Group, ...]
    speed: Speed | None = None

    def value(self, goal: str) -> tuple[float, ...]:
        """The plan's value for a goal, the larger the better, as a tuple to compare.

        Where first tokens are equal to three digits, the end of the answer decides.
        """
        if self.speed is None:
            return (-self.plan.trip_s,) if goal == "ttft" else (-self.plan.slowest_s, -self.plan.trip_s)
        if goal == "ttft":
            return -float(f"{self.speed.first_token_s:.3g}"), -self.speed.answer_s
        served = self.speed.served_per_second
        return (-self.speed.answer_s if served is None else served,)


class Planning:
    """One cluster, its devices that may hold layers, and the times of devices and links as a problem to solve.

    ``groups``: the devices as they are joined into tensor parallel groups; None: each by itself. A plan's parts are
    groups.
    """

    def __init__(self, cluster: Cluster, options: PlanOptions, groups: tuple[Group, ...] | None = None) -> None:
        self.options = options
        self.cluster = cluster
        self.devices = candidates(cluster)
        self.groups = tuple((device,) for device in self.devices) if groups is None else groups
        self.batch = PLAIN_BATCH if cluster.drafter is None else SPECULATIVE_BATCH

    @cached_property
    def problem(self) -> Problem:
        return grouped_problem(self.cluster, self.groups, self.batch)

    @property
    def names(self) -> tuple[str, ...]:
        """The name of each group, by its index: the names of its devices."""
        return tuple(" + ".join(device.name for device in group) for group in self.groups)

    def joined(self) -> list[Planning]:
        """A planning for each way to join devices into groups (``groupings``).

        Real hosts have none: their stages are not tensor parallel yet.
        """
        if self.options.real:
            return []
        _, *others = groupings(self.cluster, self.devices)
        return [self.with_groups(groups) for groups in others]

    @property
    def alone(self) -> Planning:
        """The planning in which every device is by itself."""
        return self.with_groups(tuple((device,) for device in self.devices))

    def with_groups(self, groups: tuple[Group, ...]) -> Planning:
        """The planning of the same devices in other groups."""
        return self if groups == self.groups else Planning(self.cluster, self.options, groups)

    def choice(self, name: str, plan: Plan) -> Choice:
        """A plan under a name."""
        return Choice(name, plan, staged(self.cluster, self.groups, plan.parts), groups=self.groups)

    def by_hand(self) -> Iterator[Choice]:
        """Plans with all devices in the file's order that fit: even, by memory bandwidth, and by Jupiter's method."""
        layers, count = self.problem.layers, self.problem.devices
        splits: dict[str, Sequence[int]] = {}
        if count <= layers:
            splits[EVEN] = spread(layers, count)
            splits[PROPORTIONAL] = split_by_speed(layers, [float(d.weight_bandwidth_gb_s or 0) for d in self.devices])
        paper = layer_split(list(self.problem.stage_s))
        if paper is not None:
            splits[JUPITER] = paper.counts
        for name, counts in splits.items():
            plan = plan_of(self.problem, [Part(*one) for one in enumerate(counts)])
            if math.isfinite(plan.trip_s):
                yield self.choice(name, plan)

    def ours(self) -> list[Choice]:
        """The plans of Penstock's method that are worth judging (``planner.partition.front``)."""
        return [self.choice(OURS, plan) for plan in front(self.problem)]

    def judged(self, choice: Choice) -> Choice:
        """The plan with its speed, simulated unless ``tokens`` is 0."""
        return replace(choice, speed=simulated(choice.cluster, self.options)) if self.options.tokens else choice

    def moved(self, choice: Choice) -> Choice | None:
        """The same stages with the drafter on the last stage's device; None if it is there, or does not fit there."""
        last = choice.cluster.stages[-1].last_device
        if choice.cluster.drafter in (None, last):
            return None
        try:
            return replace(choice, cluster=with_drafter_on(choice.cluster, last))
        except FieldError:
            return None

    def elsewhere(self, choice: Choice) -> Choice:
        """The better one of a judged plan and the same plan with the drafter moved to the last stage."""
        moved = self.moved(choice)
        if moved is None:
            return choice
        return max(choice, self.judged(moved), key=lambda one: one.value(self.options.goal))

    @property
    def least_slowest_s(self) -> float:
        """A lower bound, in seconds, of the slowest stage of any plan.

        It is reached if layers can be cut anywhere, and overheads and links take no time.
        """
        layers = self.problem.layers
        rates = 0.0
        for table in self.problem.stage_s:
            each = min((table[0, n] / n for n in range(1, layers + 1)), default=math.inf)
            # Layers per second add up over devices if layers can be cut anywhere.
            rates += 1 / each if math.isfinite(each) else 0.0
        return layers / rates if rates else math.inf

    def with_one_more(self, chosen: Choice) -> Choice | None:
        """The best plan with one more device like the fastest one, whose name it has; None if no link to it is known.

        Simulated plans have at most one stage more: more of them seldom pay, and take long to simulate.
        """
        fastest = max(self.devices, key=lambda device: device.weight_bandwidth_gb_s or 0.0)
        more = replace(fastest, name=f"{fastest.name}'", host=f"{fastest.host}'")
        groups = (*chosen.groups, (more,))
        further = Planning(replace(self.cluster, devices=(*self.cluster.devices, more)), self.options, groups)
        try:
            plans = further.ours()
        except FieldError:
            return None  # the cluster file states no link to a host that is not in it
        if self.options.tokens:
            most = len(chosen.plan.parts) + 1
            plans = [one for one in plans if len(one.plan.parts) <= most] or plans[-1:]
        judged = [further.judged(one) for one in plans]
        best = max(judged, key=lambda one: one.value(self.options.goal), default=None)
        if best is not None and chosen.cluster.drafter != self.cluster.drafter:
            best = further.elsewhere(best)
        return best if best is None else replace(best, name=fastest.name)


def refusal(planning: Planning) -> ConfigError:
    """The error if no plan fits, with the memory that is needed and that there is."""
    cluster = planning.cluster
    return ConfigError(
        f"cluster {cluster.name}: no plan fits: {shortage(cluster, planning.devices)}. Add devices, lower kv_slots, or "
        "take a model of fewer bits"
    )


# ------------------------------------------------------------------------------------------------------------- measured
# A cluster to plan for, from what ``penstock doctor`` measured: the fastest device of each host, and the links.

OVERHEAD_MS: Final = 0.5
"""Assumed milliseconds per batch on any device, about those of Python and messages."""
ENGINE: Final = "localhost"
"""The host of the engine, where the plan is made."""


def measured_cluster(report: DoctorReport, model: ModelPrice) -> Cluster:
    """A cluster of all hosts that were measured, each with its fastest device. Raises ConfigError if none was.

    The engine is on this host, or else on the first one, and drafts with a head like EAGLE's. A link has the worse
    figures of its two directions.
    """
    fastest = {host.host: fastest_of(host) for host in report.hosts if host.rates}
    if not fastest:
        problems = "; ".join(f"{host.host}: {host.problem or 'nothing measured'}" for host in report.hosts)
        raise ConfigError(f"doctor: no host was measured: {problems}")
    devices = [device_table(host, fastest[host.host]) for host in report.hosts if host.host in fastest]
    here = ENGINE if ENGINE in fastest else devices[0]["name"]
    table = {
        "name": "measured",
        "description": "hosts that penstock doctor has measured",
        "devices": devices,
        "stages": [{"devices": [device["name"]]} for device in devices],
        "engine": here,
        "links": {"between": links_between(report.links, list(fastest))},
    }
    try:
        file = parse(ClusterFile, {**table, "drafter": here})
        cluster = cluster_of(file, model, tuple(Stage(devices=stage.devices) for stage in file.stages))
    except FieldError as error:
        raise ConfigError(f"doctor: {error}") from None
    return replace(cluster, draft_as_model=eagle(model))


def fastest_of(host: ExaminedHost) -> DeviceRates:
    """The rates of the host's device that reads weights fastest."""
    return max(host.rates, key=lambda rate: rate.weight_bandwidth_gb_s)


def device_table(host: ExaminedHost, rates: DeviceRates) -> dict[str, Any]:
    """A device's entry in a cluster file's table."""
    found = host.facts.device(rates.device) if host.facts is not None else None
    memory = {"memory_gb": found.free / 1e9} if found is not None and found.free is not None else {}
    return {
        "name": host.host,
        "host": host.host,
        "weight_bandwidth_gb_s": rates.weight_bandwidth_gb_s,
        "compute_tflops": rates.compute_tflops,
        "overhead_ms": OVERHEAD_MS,
        **memory,
    }


def links_between(links: list[LinkRates], hosts: list[str]) -> list[dict[str, Any]]:
    """An entry for every two hosts that reach each other."""
    ways: dict[tuple[str, ...], list[tuple[float, float]]] = {}
    for link in links:
        if link.latency_ms is not None and link.bandwidth_gbit_s and {link.source, link.to} <= set(hosts):
            ends = tuple(sorted((link.source, link.to)))
            ways.setdefault(ends, []).append((link.bandwidth_gbit_s, link.latency_ms))
    return [
        {"ends": ends, "bandwidth_gbit_s": min(rate for rate, _ in both), "latency_ms": max(ms for _, ms in both)}
        for ends, both in ways.items()
    ]


# --------------------------------------------------------------------------------------------------------------- priced
# A checkpoint's prices, from the sizes in its configuration: only dense models of Llama's form have them.

BITS: Final = 32
"""Bits per weight: the doctor measures rates in float32. They decide how layers are split, whatever the format."""
EXPERTS: Final = ("num_experts", "num_local_experts", "n_routed_experts")
"""Fields of a configuration by which a mixture of experts is known."""


def price_of(model: str) -> ModelPrice:
    """The prices of a folder, a GGUF file or a hub id. Raises ConfigError if the configuration lacks a size."""
    place = resolve(model)
    if place.is_file():
        return price_of_header(model, read_header(place))
    table = stated_config(place)
    if any(table.get(name) for name in EXPERTS):
        raise unpriced(model, "it is a mixture of experts")
    read = reader(model, table.get)
    heads = read("num_attention_heads")
    key_value = table.get("num_key_value_heads") or heads
    width = table.get("head_dim") or read("hidden_size") // heads
    return llama(
        layers=read("num_hidden_layers"),
        hidden=read("hidden_size"),
        intermediate=read("intermediate_size"),
        key_value=int(key_value) * int(width),
        vocabulary=read("vocab_size"),
        bits=BITS,
        tied=bool(table.get("tie_word_embeddings")),
    )


def price_of_header(model: str, header: Header) -> ModelPrice:
    """The prices of a GGUF file. Raises ConfigError if its header lacks a size, or its layers differ."""
    values: Mapping[str, Any] = {
        name: header.value(f"{header.architecture}.{name}")
        for name in ("block_count", "embedding_length", "feed_forward_length", "attention.head_count")
    }
    read = reader(model, values.get)
    heads, hidden = read("attention.head_count"), read("embedding_length")
    key_value = header.value(f"{header.architecture}.attention.head_count_kv") or heads
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or type(key_value) is not int or header.value(f"{header.architecture}.expert_count"):
        raise unpriced(model, "it is a mixture of experts, or its layers differ")
    return llama(
        layers=read("block_count"),
        hidden=hidden,
        intermediate=read("feed_forward_length"),
        key_value=key_value * int(header.value(f"{header.architecture}.attention.key_length") or hidden // heads),
        vocabulary=embedding.shape[0],
        bits=BITS,
        tied="output.weight" not in header.tensors,
    )


def reader(model: str, get: Callable[[str], Any]) -> Callable[[str], int]:
    """A function that reads a size by name. It raises ConfigError for one that is missing or no positive integer."""

    def read(name: str) -> int:
        if type(value := get(name)) is not int or value < 1:
            raise unpriced(model, f"its configuration says no {name}")
        return value

    return read


def unpriced(model: str, why: str) -> ConfigError:
    """The error for a model without prices, with the reason and the remedy."""
    return ConfigError(
        f"model {model}: cannot be priced: {why}; plan a cluster file with an as_model table of its sizes instead"
    )


# ---------------------------------------------------------------------------------------------------------------- write
# A cluster as the text of a file that ``load_cluster`` reads.

WRITTEN_ONLY_WITH_KINDS = "kind"
"""The field of a device that is not written, since the numbers of its kind are written on the device itself."""


def cluster_toml(cluster: Cluster) -> str:
    """The file's text: every number stands on its device, and prices are tables."""
    table = without_none(dataclasses.asdict(cluster))
    for device in table["devices"]:
        device.pop(WRITTEN_ONLY_WITH_KINDS, None)
    return tomli_w.dumps(table)


def without_none(value: Any) -> Any:
    """A value without entries that are None, since TOML has no null; tuples become lists."""
    if isinstance(value, Mapping):
        return {key: without_none(one) for key, one in value.items() if one is not None}
    if isinstance(value, tuple | list):
        return [without_none(one) for one in value]
    return value
