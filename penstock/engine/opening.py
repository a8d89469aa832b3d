"""Opens an engine: its hosts, its plan, and the start of its processes."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, TypeVar

from rich.console import Console

from penstock.checkpoint.look import GGUF, key_groups
from penstock.cluster.load import DRAFTER_ON, ON_FIRST, ON_LAST
from penstock.cluster.spec import LayerTimes
from penstock.config import FieldError, check
from penstock.core import CheckpointChanged, ConfigError
from penstock.drafters.base import Weights
from penstock.engine.options import AUTO, EngineOptions, model_folder
from penstock.engine.profile.hosts import (
    HostsProfile,
    cluster_of_hosts,
    completed,
    known_profile,
    slow_groups,
    with_prefill_times,
)
from penstock.engine.profile.measure import OnStep, drafter_bytes, kept_for_sharing, needed_by_rank
from penstock.engine.resolve import Resolved, resolve_options
from penstock.environment import RAY, require
from penstock.files import CHANGED, DTYPE_BYTES, FileStamps
from penstock.hosts.facts import HostFacts, own_facts
from penstock.hosts.fleet import LOOK_S, Fleet, FleetExecutor, HostsLost
from penstock.hosts.keys import security_for
from penstock.hosts.placement import (
    HERE,
    AskedHosts,
    asked_hosts,
    check_memory,
    hosts_asked_for,
    hosts_for_drafter,
    in_gb,
    other_hosts,
)
from penstock.hosts.remote import name_and_address
from penstock.hosts.weights import OUTSIDE, Held, files_of
from penstock.pipeline.base import Executor
from penstock.pipeline.forkserver import check_open_files, shared_fork_server
from penstock.pipeline.processes import OnLoading, ProcessExecutor
from penstock.pipeline.stage_process import LoadingBar, LoadingCount
from penstock.planner.costs import Batch, candidates, problem_of, shortage
from penstock.planner.partition import front
from penstock.speculation import SpeculativeConfig

# --------------------------------------------------------------------------------------------------------------- on ray
# Opens an engine's hosts on a Ray cluster.


def open_on_ray(options: EngineOptions, address: str, on_loading: OnLoading | None) -> FleetExecutor:
    """The host that runs the stages, once an agent on each node that is needed has come.

    Raises ConfigError if Ray is not installed, does not answer, has no room, or takes commands from anybody.
    """
    require([RAY])
    check(options.keys is None, "keys", options.keys, "left out with Ray: each engine makes keys of its own")
    from penstock.hosts.ray import STARTED_S, RayCluster

    assert options.pipeline_parallel_size is not None
    with ExitStack() as in_vain:
        cluster = RayCluster(address, options.insecure)
        in_vain.callback(cluster.close)
        fleet = Fleet([], cluster.security, private_network=options.insecure, door=f"{cluster.here}:0")
        in_vain.callback(fleet.close)
        # An agent that is lost before it has come is started again only where Ray has another node for it.
        fleet.wait_for(cluster.start_agents(options.pipeline_parallel_size, options.device, fleet.door), STARTED_S)
        executor = FleetExecutor(fleet, options.stage_timeout, on_loading, started_by=cluster)
        in_vain.pop_all()
    return executor


# -------------------------------------------------------------------------------------------------------------- planned
# ``layer_split="auto"``: plans the stages that suit the hosts at hand, from measured times.

log = logging.getLogger(__name__)

ALIKE: Final = 1.1
"""Factor up to which times of devices and layers may differ and count as alike: an even split is then as good."""
PLAIN: Final = Batch(rows=1, context=512)
"""The batch of plain decoding that a plan is made for. A context of 512 tokens is a short chat."""
SPECULATIVE: Final = Batch(rows=8, context=512)
"""The batch of drafted rows that a plan is made for. With so few rows devices still mostly read weights: they compute
20 operations or more in a byte's time (``cluster.drawn.OPERATIONS_PER_BYTE``)."""
LOOKED_UP, DRAFTED = 0.25, 0.6
"""Shares (0 to 1) of a text's tokens that are assumed to come one batch after another, with prompt lookup and with a
drafter that has weights. Each other token costs a trip of one row, since ``auto`` decodes plainly where drafts do not
pay. Both are guesses, since nothing has been drafted yet. Larger ones favour plans with a quick slowest stage, smaller
ones those with a short trip."""


def planned(options: EngineOptions, executor: FleetExecutor) -> EngineOptions:
    """The options with the planned layers, and hosts in the planned order. The log says what was decided.

    "auto" measures what has not been measured. Without ``layer_split`` there is a plan only if the hosts have been
    measured, and they or the model's layers differ; else they share the layers evenly. Hosts that play an emulated
    cluster are not planned for. Raises ConfigError if the model fits in no way.
    """
    asked = options.layer_split == AUTO
    if options.hosts is None or options.cluster is not None or not (asked or may_be_planned(options)):
        return options
    try:
        profile = known_profile(options, executor)
    except FieldError:  # there is no plan for such hosts
        if asked:
            raise
        return options
    if asked:
        profile = completed(profile, executor, reporting)
    elif profile.missing:
        log.warning("layers are split evenly: `penstock profile` has not measured %s", profile.missing)
        return options
    elif alike(profile.times.values()):
        return options
    return decided(options, profile)


def reporting(what: str) -> OnStep:
    """A callback for progress that logs, once, that ``what`` is being measured."""

    def on_step(done: int, total: int) -> None:
        if done == 1:
            log.warning("measuring %s, to split the layers", what)

    return on_step


def may_be_planned(options: EngineOptions) -> bool:
    """Whether the options leave the layers of stages open, and give each host one stage."""
    assert options.hosts is not None
    names = asked_hosts(options.hosts).names
    alone = options.tensor_parallel_size == 1
    open_ = options.layer_split is None and options.pipeline_parallel_size in (None, len(names))
    return alone and open_ and len(names) > 1


def alike(times: Iterable[LayerTimes]) -> bool:
    """Whether all devices take about the same time for every kind of layer, with one row and with many."""
    found = list(times)
    for row in (0, -1):
        each = [grid[row][0] for one in found for grid in (one.layer_ms, *one.kind_ms)]
        if max(each) > ALIKE * min(each):
            return False
    return True


def decided(options: EngineOptions, profile: HostsProfile) -> EngineOptions:
    """The options with the best plan by the measured times. Raises ConfigError if the model fits in no way."""
    found, hits = profile.candidates, hits_of(options)
    # A drafter with weights needs room on its host; that of the last stage is known only once there is a plan.
    drafter = hosts_for_drafter(options.drafter_on, None) or [HERE]
    drafts = hits == DRAFTED and options.drafter_on not in (ON_FIRST, ON_LAST)
    cluster = cluster_of_hosts(profile, drafts=drafts, drafter_host=drafter[0])
    devices = candidates(cluster)
    plain, drafted = (problem_of(cluster, devices, batch) for batch in (PLAIN, SPECULATIVE))
    plans = [plan.parts for problem in (plain, drafted) for plan in front(problem)]
    if not plans:
        problem = f"layer_split: no plan fits: {shortage(cluster, devices)}"
        raise ConfigError(f"{problem}. Add hosts, lower kv_slots, or quantize the model")
    # The least expected time per token: a hit comes with the next batch, any other token after a trip.
    best = min(plans, key=lambda parts: hits * drafted.slowest_s(parts) + (1 - hits) * plain.trip_s(parts))
    used = [devices[part.device] for part in best]
    order, held = [device.host for device in used], {device.name for device in used}
    spares = [one.name for label, one in found.devices.items() if label not in held]
    split = ",".join(str(part.layers) for part in best)
    log.warning(
        "layers are split %s over %s%s: a row takes %.1f ms through all, and %.1f ms in the slowest stage",
        split,
        ", ".join(order),
        f", and {', '.join(spares)} kept as spares" if spares else "",
        1e3 * plain.trip_s(best),
        1e3 * plain.slowest_s(best),
    )
    return replace(options, hosts=",".join([*order, *spares]), pipeline_parallel_size=len(order), layer_split=split)


def hits_of(options: EngineOptions) -> float:
    """The share of tokens that need not wait for a trip."""
    config = options.speculative_config
    if not isinstance(config, SpeculativeConfig) or not config.drafts:
        return 0.0
    return LOOKED_UP if config.drafter_options.weights is Weights.NONE else DRAFTED


# -------------------------------------------------------------------------------------------------------------- opening
# Opens the hosts of an engine's stages: this host, or those that its options name.

WORTH_TELLING: Final = 1 << 30
"""Number of bytes that prefix caching may cost before the log says so. It is an eighth of the memory of a board with 8
GiB."""


def open_executor(options: EngineOptions, on_loading: OnLoading | None = None) -> ProcessExecutor:
    """The host that runs the stages, attached to all that are named. Raises ConfigError for one that cannot be used."""
    check_open_files((options.pipeline_parallel_size or 1) * options.tensor_parallel_size)
    assert not isinstance(options.cluster, str)
    names = other_hosts(hosts_used(options))
    if options.drafter_on is not None:
        for name in set(other_hosts(own_of_drafter(options))) - set(hosts_asked_for(options.hosts, options.cluster)):
            name_and_address(name, DRAFTER_ON)  # which names its own option where nobody knows the host
    asked = AskedHosts(()) if options.hosts is None else asked_hosts(options.hosts)
    if not names and not asked.come:
        if not model_folder(options.model, "target").endswith(GGUF):
            shared_fork_server().expect_transformers()  # it imports them while this process does
        return ProcessExecutor(options.transport, options.stage_timeout, on_loading=on_loading)
    if options.insecure:
        log.warning(
            "insecure: what is asked and answered crosses the network as plain text, and whoever is there can join"
        )
    if asked.ray:
        return open_on_ray(options, asked.ray, on_loading)
    fleet = Fleet(names, security_for(options.keys, options.insecure), options.insecure, asked.door)
    try:
        if asked.door:
            fleet.wait_for(missing_hosts(options))
        return FleetExecutor(fleet, options.stage_timeout, on_loading)
    except BaseException:
        fleet.close()
        raise


def hosts_used(options: EngineOptions) -> list[str]:
    """The names of all hosts for stages, and of the drafter's."""
    assert not isinstance(options.cluster, str)
    return [*hosts_asked_for(options.hosts, options.cluster), *own_of_drafter(options)]


def own_of_drafter(options: EngineOptions) -> list[str]:
    """The host that is named for a drafter with weights; empty where none is."""
    assert not isinstance(options.cluster, str)
    drafts = isinstance(options.speculative_config, SpeculativeConfig)
    drafts = drafts and options.speculative_config.drafter_options.weights is not Weights.NONE  # type: ignore[union-attr]
    return hosts_for_drafter(options.drafter_on, options.cluster) if drafts else []


def missing_hosts(options: EngineOptions) -> int:
    """Number of hosts that have to come: one for each stage that is not on this host, and the drafter's own."""
    assert options.hosts is not None
    assert options.pipeline_parallel_size is not None
    named = asked_hosts(options.hosts).names
    own = set(hosts_used(options)) - set(named)
    return options.pipeline_parallel_size - (HERE in named) + len(own)


def resolve_on(options: EngineOptions, executor: Executor) -> Resolved:
    """Resolve options on the hosts that ``host`` reaches. Raises ConfigError for what one of them cannot do."""
    if not isinstance(executor, FleetExecutor):
        setup = told(resolve_options(options))
        check_here(setup)
        return with_prefill_times(setup, {}, encrypted=False)
    fleet = executor.fleet
    if options.hosts is not None and asked_hosts(options.hosts).come:
        options = replace(options, hosts=",".join(present(options, fleet)))
    options = planned(options, executor)
    assert not isinstance(options.cluster, str)
    living = fleet.joined_by(other_hosts(hosts_used(options)))
    setup = told(resolve_options(options, living))
    check_here(setup)
    for remark in slow_groups(setup, living, encrypted=fleet.security is not None):
        log.warning("%s", remark)
    for steps in (providing(setup, executor, living), providing_drafter(setup, executor)):
        try:
            wait_through(steps, executor)
        except HostsLost as lost:
            # A busy host, or one behind a poor link, may miss a few beats: once each, it is waited for.
            log.warning("%s; it is waited for", lost)
            fleet.joined_by(lost.names)
            wait_through(waiting(executor, lost.names), executor)
    return with_prefill_times(setup, living, encrypted=fleet.security is not None)


def wait_through(steps: Generator[float], executor: Executor) -> None:
    """Run ``steps`` to their end, and wait until each time that they yield."""
    for due in steps:
        executor.wait(due)


def told(setup: Resolved) -> Resolved:
    """Return ``setup``, and log a warning of memory or time that it takes and a user may not expect.

    Prefix caching may cost much that one long text would not need; weights that a file holds in whole numbers may be
    held as floats, where a processor does not compute in whole numbers; and a GPU makes floats of them at every step.
    """
    bits, options = setup.checkpoint.weights.bits, setup.options
    if (
        bits is not None
        and setup.quantization == "none"
        and (options.quantization == "auto" or options.device != "cpu")
    ):
        log.warning(
            "the file's weights of %d bits are held as %s on %s, which takes %s in all%s",
            bits,
            options.dtype,
            options.device,
            *size_in_floats(setup),
        )
    if setup.quantization != "none" and options.device != "cpu":
        log.warning(
            "weights held as %s become floats again at every step on %s: quantization none is many times as fast where "
            "its %s fit%s",
            setup.quantization,
            options.device,
            *size_in_floats(setup),
        )
    if setup.options.enable_prefix_caching and (kept := kept_for_sharing(setup)) > WORTH_TELLING:
        log.warning(
            "prefix caching has layers with a window or a state keep up to %.1f GiB that no later token reaches; "
            "enable_prefix_caching=False (--no-enable-prefix-caching) spares them",
            kept / 2**30,
        )
    return setup


def size_in_floats(setup: Resolved) -> tuple[str, str]:
    """The memory that all weights take as floats, and, for float32 on a GPU, a hint at the dtype that takes half."""
    options = setup.options
    size = in_gb(DTYPE_BYTES[options.dtype] * sum(setup.checkpoint.weights.sizes().values()))
    halves = options.dtype == "float32" and options.device != "cpu"
    return size, "; dtype auto takes half of that" if halves else ""


def check_here(setup: Resolved) -> None:
    """Raise ConfigError if the stages on this host do not fit. Only before they start: free memory is what is left."""
    if "" in (*setup.all_hosts, setup.drafter_host if setup.drafts else None):
        check_room(setup, {"": own_facts("", gpus=any(device != "cpu" for device in setup.devices))})


def check_room(setup: Resolved, facts: Mapping[str, HostFacts]) -> None:
    """Raise ConfigError for each of these hosts on which ranks, and the drafter if it is there, do not fit."""
    hosts, devices, needed = setup.all_hosts, devices_by_rank(setup), needed_by_rank(setup)
    if not setup.drafts:
        check_memory(hosts, devices, needed, facts)
        return
    here = *hosts, setup.drafter_host
    check_memory(here, [*devices, setup.devices[-1]], [*needed, drafter_bytes(setup)], facts, drafts=True)


def providing(setup: Resolved, executor: FleetExecutor, living: Mapping[str, HostFacts]) -> Generator[float]:
    """Have every host of a setup hold the layers of its stages. Yields times at which to go on, until all do.

    ``living``: facts of the hosts for which the setup was made. Raises ConfigError for a host that cannot hold them and
    for files that cannot be read, and CheckpointChanged.
    """
    check_room(setup, living)
    layers = layers_by_host(setup)
    ask_for(executor, setup.checkpoint.source, setup.checkpoint.num_layers, layers)
    yield from waiting(executor, layers)


def ask_for(executor: FleetExecutor, source: Path, total: int | None, layers: Mapping[str, Collection[Held]]) -> None:
    """Ask hosts to get hold of parts of the checkpoint at ``source``. Raises ConfigError if it cannot be read."""
    try:
        executor.fleet.ask(executor.offer(source, total), layers)
    except OSError as error:
        raise ConfigError(f"model: {source} cannot be read: {error}") from error


def waiting(executor: FleetExecutor, names: Collection[str]) -> Generator[float]:
    """Yields times at which to go on, until these hosts hold what they were asked for.

    Raises ConfigError, naming each host that cannot hold them, and HostsLost for hosts that are lost.
    """
    while not executor.fleet.settled(names):
        executor.fleet.tell_progress()
        yield executor.now() + LOOK_S
    executor.fleet.tell_progress()
    executor.fleet.check(names)


def providing_drafter(setup: Resolved, executor: Executor) -> Generator[float]:
    """Have the drafter's host, if it is another one, hold what the drafter loads; see ``providing``."""
    name = setup.drafter_host
    if not name or not isinstance(executor, FleetExecutor):
        return
    for source, total, layers in drafter_parts_on(setup, name):
        ask_for(executor, source, total, {name: layers})
    yield from waiting(executor, [name])


def devices_by_rank(setup: Resolved) -> list[str]:
    """The device of each rank, stage by stage: all of a stage are on devices of one kind."""
    return [device for device, group in zip(setup.devices, setup.groups, strict=False) for _ in group]


def drafter_is_held(setup: Resolved, executor: FleetExecutor) -> bool:
    """Whether the drafter's host, another one, is there and holds all that the drafter loads."""
    name = setup.drafter_host
    return all(
        executor.fleet.hold(executor.offer(source, total), {name: layers})
        for source, total, layers in drafter_parts_on(setup, name)
    )


def drafter_parts_on(setup: Resolved, name: str) -> list[tuple[Path, int | None, list[Held]]]:
    """The checkpoints that the drafter on host ``name`` loads: path, number of layers, and the layers there.

    Beside its own it needs parts of the target's.
    """
    target = setup.checkpoint.source, setup.checkpoint.num_layers, layers_for(setup, name)
    if setup.draft is not None:
        own = setup.draft.num_layers
        return [target] if setup.draft.source == target[0] else [(setup.draft.source, own, [Held(0, own)]), target]
    assert setup.speculator is not None
    return [target] if setup.speculator.path == target[0] else [(setup.speculator.path, None, [Held(0, 1)]), target]


def layers_for(setup: Resolved, name: str) -> list[Held]:
    """The parts of the target that the host holds, for its ranks and, if it is there, for the drafter.

    A learned drafter reads embedding and head, and an MTP head is behind the last layer. A draft model reads only the
    tokenizer, for grammars, unless it is the target itself.
    """
    total = setup.checkpoint.num_layers
    groups = key_groups(setup.checkpoint.config)
    found = [
        Held(*layers, rank, len(hosts), groups)
        for hosts, layers in zip(setup.groups, setup.layers, strict=True)
        for rank, host in enumerate(hosts)
        if host == name
    ]
    if name != setup.drafter_host:
        return found
    if setup.draft is not None and setup.draft.source == setup.checkpoint.source:
        found.append(Held(0, total))
    if setup.speculator is not None:
        found.append(Held(*OUTSIDE))
        if setup.speculator.path == setup.checkpoint.source:
            found.append(Held(total, total + 1))
    return found


def present(options: EngineOptions, fleet: Fleet) -> list[str]:
    """The hosts that are named, then those that have come. One that is named for the drafter alone is neither."""
    assert options.hosts is not None
    named = asked_hosts(options.hosts).names
    known = {*named, *hosts_used(options)}
    return [*named, *(name for name in fleet.hosts if name not in known)]


def layers_by_host(setup: Resolved) -> dict[str, list[Held]]:
    """The parts of the target that each of the other hosts with stages holds, by host name."""
    return {name: layers_for(setup, name) for name in dict.fromkeys(setup.all_hosts) if name}


# ------------------------------------------------------------------------------------------------------------- starting
# Starts an engine that a person waits for: shows how far its processes are, and the memory that they then hold.

Engine = TypeVar("Engine")


@dataclass(frozen=True)
class Start:
    """Seconds that the start took, and bytes that stages and drafter hold since."""

    seconds: float
    weight_bytes: int
    kv_bytes: int


def watched(
    make: Callable[..., Engine], options: EngineOptions, loading: LoadingCount | None = None
) -> tuple[Engine, Start]:
    """The engine that ``make`` (``LLM``, ``AsyncLLM``, ``Replicas``) returns, once its stages have loaded their layers.

    ``loading`` is told how far they are; None shows a bar on stderr. Raises what ``make`` raises. Objects that are
    alive by then are never garbage-collected, so this is for programs that run the engine and end.
    """
    begin = time.monotonic()
    with loading or LoadingBar(Console(stderr=True)) as bar:
        if options.data_parallel_size > 1:  # each engine opens an executor of its own
            engine = make(on_loading=bar, **vars(options))
        else:
            executor = open_executor(options, on_loading=bar)
            try:
                engine = make(host=executor, **vars(options))
            except BaseException:
                executor.close()
                raise
    gc.collect()
    gc.freeze()  # a collection would hold up a token for as long as it takes to look through all that was imported
    return engine, Start(time.monotonic() - begin, *bar.held)


def loaded(setup: Resolved, start: Start, numerics: str) -> str:
    """A loaded model in a line, as ``30 layers in int4, exact numerics, 2 stages · 97 MB of weights, ...``.

    ``numerics`` is ``LLM.numerics``.
    """
    form = setup.options.dtype if setup.quantization == "none" else setup.quantization
    ranks = max(map(len, setup.groups))
    weights, room = (f"{held / 1e6:,.0f} MB" for held in (start.weight_bytes, start.kv_bytes))
    parts = [
        f"{setup.checkpoint.num_layers} layers in {form}, {numerics} numerics, "
        f"{setup.stages} stage{'s' * (setup.stages != 1)}{f' of {ranks} ranks' * (ranks > 1)}",
        f"{weights} of weights, {room} for {setup.capacity:,} tokens",
        f"loaded in {start.seconds:.1f} s",
    ]
    return " · ".join(parts)


# --------------------------------------------------------------------------------------------------------------- loaded
# The files that an engine's processes load, which must not change while it runs.


class LoadedFiles:
    """The files of the target and the drafter, as they were when this was made. Raises OSError, and ConfigError."""

    def __init__(self, setup: Resolved) -> None:
        self._stamps = FileStamps.of(file for source in sources_of(setup) for file in files_of(source))

    def check(self) -> None:
        """Raise CheckpointChanged if a file has changed: a stage that is started again would load other weights."""
        if (file := self._stamps.changed) is not None:
            raise CheckpointChanged(f"model: {file} {CHANGED}")


def sources_of(setup: Resolved) -> Iterator[Path]:
    """The checkpoints of the target and the drafter: folders or files."""
    yield setup.checkpoint.source
    if setup.draft is not None:
        yield setup.draft.source
    if setup.speculator is not None:
        yield setup.speculator.path
