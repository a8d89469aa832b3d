"""The engine in virtual time on modelled devices, with scripts instead of models."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from penstock.cluster import Cluster, LinkTiming, draft_link, draft_timing, link_timings, load_cluster, stage_timings
from penstock.cluster.timing import BATCH_ROWS, StageTiming
from penstock.config import FieldError, check, check_positive
from penstock.core import FinishReason, SpeculationMetrics
from penstock.drafters.base import Draft, DraftRequest, InstantDrafter
from penstock.drafters.learned import Computed
from penstock.emulation.cluster import DeviceTurns, EmulatedDrafter
from penstock.emulation.device import ExclusiveLink, LinkModel, Port, attended_by, link_of
from penstock.emulation.stage import StageEmulation, emulated_driver
from penstock.engine.loop import EngineLoop, Observer
from penstock.engine.scheduler import Scheduler
from penstock.estimates.estimates import Estimates
from penstock.lab.script import Script
from penstock.messages import Batch, Cancel, Candidates, Features, Message, Result, Rows, SampledToken, Sampling
from penstock.pipeline.base import VirtualClock
from penstock.pipeline.engine_end import InProcessPipeline
from penstock.planner.costs import PieceTable
from penstock.requests.request import Request
from penstock.requests.slots import SlotPool, speculative_slots
from penstock.speculation import SpeculativeConfig, make_strategy
from penstock.stage.driver import Cancels, Computation, Core, Device, Link, Links, Outgoing, StageDriver
from penstock.stage.visibility import ProtocolError
from penstock.strategies.base import Strategy
from penstock.tree import Node

# ------------------------------------------------------------------------------------------------------------- clusters
# The clusters that can be simulated: those with modelled times.


def modelled_cluster(name: str, **changes: Any) -> Cluster:
    """The cluster of ``load_cluster``. Raises ConfigError as it does, and FieldError if the cluster models no times."""
    cluster = load_cluster(name, **changes)
    if not cluster.emulated:
        raise FieldError("cluster", f"{name} has no as_model, so there are no modelled times to simulate; name another")
    return cluster


def check_drafter(cluster: Cluster) -> None:
    """Raise FieldError if the cluster names no drafter."""
    if cluster.drafter is None:
        raise FieldError("cluster", f"{cluster.name} names no drafter; add drafter and draft_as_model to its file")


# ------------------------------------------------------------------------------------------------------------- pipeline
# The simulated pipeline: stages work while the engine waits, and wake it only with messages that reach it.


class SimulatedPipeline(InProcessPipeline):
    """A pipeline under a virtual clock, which is also the clock of the engine at its end.

    An engine acts on the messages that it is sent, and at the times at which it asks to be woken. If every message
    between two stages woke it, it would mostly find nothing to do.
    """

    def __init__(self, drivers: Sequence[StageDriver], clock: VirtualClock, entrance: Link) -> None:
        super().__init__(drivers, clock, entrance)
        self._time = clock
        self._told = False
        self._sharing = [driver.index for driver in drivers if isinstance(driver, SharedDriver)]
        """Indices of the stages of one host: the time at which one of them is done depends on the others."""

    @property
    def due(self) -> float | None:
        """The time at which the next message reaches the engine, if it is known yet; ``wait`` returns then anyway."""
        return self._end.due

    def now(self) -> float:
        return self._time.now()

    def wait(self, until: float | None) -> None:
        """Let the stages work until this time, or until they send the engine a message."""
        self._told = False
        last = math.inf if until is None else until
        while not self._told and (due := min(self._dues)) <= last and due < math.inf:
            self._time.wait(due)
            self._work()
        if not self._told:
            self._time.wait(until)

    def wake(self) -> None:
        self._time.wake()

    def _receive(self, message: Message, arrives: float) -> None:
        super()._receive(message, arrives)
        self._told = True

    def _ask_due(self, index: int) -> None:
        # A step of one stage changes the times at which the other stages of its host are done.
        for stage in self._sharing or (index,):
            super()._ask_due(stage)


# ---------------------------------------------------------------------------------------------------------------- stage
# The computation of a simulated stage, which is nothing but the target's picks, known from the script.


class SimulatedCore:
    """A ``StageCore`` for a ``StageDriver`` that drops dead rows and, on the last stage, picks tokens from the script.

    Off the target's path the script's pick has no meaning, and none is asked for: only the root's pick is followed.
    """

    def __init__(self, script: Script, is_last: bool) -> None:
        self.is_last = is_last
        self._script = script
        self._cancels = Cancels()

    def cancel(self, message: Cancel) -> None:
        self._cancels.add(message)

    def missing_features(self, batch: Batch) -> set[tuple[int, int]]:
        return set()

    def add_features(self, features: Features, states: Any) -> None:
        pass

    def tapped(self) -> None:
        return None

    def process(self, batch: Batch, hidden: Any) -> tuple[list[int], Any, list[SampledToken], list[Candidates]]:
        if batch.stream != self._cancels.next_stream:
            raise ProtocolError(f"batch {batch.stream} arrived where {self._cancels.next_stream} was due")
        rows = self._cancels.surviving(batch)
        self._cancels.passed(batch.stream)
        picks = []
        if self.is_last:
            columns, alive = batch.rows, set(rows)
            picks = [
                SampledToken(columns.nodes[row], self._script.after(columns.requests[row], columns.positions[row]))
                for row in batch.wanted
                if row in alive
            ]
        return rows, hidden, picks, []


# -------------------------------------------------------------------------------------------------------------- drafter
# A drafter that follows a script on the target's path, and gives drafts of the same kind off it.


class ScriptedDrafter(InstantDrafter):
    """A drafter that answers from a ``Script``, at once; ``EmulatedDrafter`` around it adds the modelled time."""

    def __init__(self, script: Script) -> None:
        super().__init__()
        self._script = script
        pools = [script.pool, *(one.pool for one in script.further)]
        self._candidates = [[tuple(enumerate(chances)) for chances in pool] for pool in pools]
        """Every draft of every pool, its candidates' ids being their ranks."""
        self._off_path: defaultdict[int, dict[int, int]] = defaultdict(dict)
        """A hash of the path to each node that was asked about off the target's path, by request and node id."""
        self._computed = Computed()

    @property
    def rows_per_node(self) -> int:
        return self._script.block

    def ask(self, asks: Sequence[DraftRequest]) -> int:
        """Answer each node from the script. Returns the rows that a real drafter would compute."""
        rows = 0
        for ask in asks:
            rows += len(ask.request.prompt) if ask.request.produced == 0 else 0
            for node in ask.nodes:
                computed, beyond = self._computed_for(ask.request, node, ask.levels)
                rows += computed
                self._answers.append(self._draft(ask.request, node, ask.count, beyond))
        return rows

    def forget(self, request: Request) -> None:
        self._off_path.pop(request.number, None)
        self._computed.forget(request)

    def _computed_for(self, request: Request, node: Node, levels: float) -> tuple[int, int]:
        """The rows that are computed for a node, and how many tokens it is after the last one shown; 0: it is shown.

        No rows are computed if the block of a node above reaches its level.
        """
        script, in_flight = self._script, node.position - request.tree.root.position
        beyond = 0 if script.shows_in_flight else in_flight
        if script.block == 1:
            return 1, beyond
        if distance := self._computed.above(request, node, levels)[1]:
            return 0, distance if script.shows_in_flight else in_flight
        self._computed.keep(request.number, node, max(0, script.block - in_flight - 1), [])
        return script.block, beyond

    def _draft(self, request: Request, node: Node, count: int, beyond: int) -> Draft:
        """The draft of a node from the pool for its distance from what was shown: by position on the target's path,
        else by a hash of its path.

        The hash is over the tokens since the target's path was left, so that it depends neither on the order of
        questions nor on the strategy.
        """
        number, script = request.number, self._script
        place = min(beyond, len(script.further))
        pool = self._candidates[place]
        if node.parent is not None:
            off_path = self._off_path[number]
            above = off_path.get(node.parent.id)
            if above is not None or node.token != script.after(number, node.parent.position):
                off_path[node.id] = key = hash((number if above is None else above, node.position, node.token))
                return Draft(node, pool[key % len(pool)][:count])
        drafts, i = script.drafts[number], node.position + 1 - script.prompts[number]
        if place and i < len(drafts):
            candidates = script.further[place - 1].candidates(number, i, script.picks[number][i])
            return Draft(node, tuple(candidates[:count]))
        return Draft(node, pool[drafts[i] if i < len(drafts) else 0][:count])


# ------------------------------------------------------------------------------------------------------------------ run
# Runs strategies over a script on a modelled cluster, in virtual time.


@dataclass
class Simulated:
    """One request under one strategy.

    ``seconds`` of virtual time are from the first of its ``tokens`` to the last. Busy fractions are over the same time:
    the mean of the stages, and the drafter's. ``rows`` entered in addition to those of the prompt.
    """

    tokens: int
    seconds: float
    first_token_seconds: float
    stages_busy: float
    drafter_busy: float
    rows: int
    metrics: SpeculationMetrics


@dataclass
class Timed:
    """Collects the virtual times at which a request was queued and at which its tokens came, in seconds."""

    queued: float = 0.0
    moments: list[float] = field(default_factory=list)

    def append(self, pick: SampledToken, at: float) -> FinishReason | None:
        self.moments.append(at)
        return None

    def detokenize_pending(self) -> None:
        pass

    def finish(self, reason: FinishReason, at: float, plain_s: float = 0.0) -> None:
        pass


class Watch(Observer):
    """Collects the times in which stages and drafter worked, as (start, end)."""

    def __init__(self) -> None:
        self.stages: list[tuple[float, float]] = []
        self.drafter: list[tuple[float, float]] = []

    def arrived(self, result: Result, at: float) -> None:
        self.stages += [(span.start, span.end) for span in result.spans]

    def drafted(self, drafts: Sequence[Draft], asked_at: float, at: float) -> None:
        self.drafter.append((asked_at, at))


def simulate(
    cluster: Cluster,
    script: Script,
    speculation: SpeculativeConfig | None,
    warm_up: int = 0,
    overhead_per_hop: float = 0.0,
    host: SharedHost | None = None,
    prefill_chunk: int | None = None,
) -> list[Simulated]:
    """Run every request of the script alone, one after the other, with one strategy; None decodes plainly.

    The engine is a fresh one, and keeps what it learns from request to request. The first ``warm_up`` tokens of the
    first request are decoded before, and do not count. Every message takes ``overhead_per_hop`` seconds longer than its
    link does, for example as measured by ``penstock bench``. With ``host`` all stages compute on it, whatever hosts the
    cluster names; drafter and engine have their own. Prompts enter in planned pieces, or in chunks of ``prefill_chunk``
    tokens. The cluster has to be emulated and, unless decoding is plain, to name a drafter.
    """
    numbers = [*range(len(script.picks))]
    if warm_up:
        # The warm-up is a shortened copy of request 0, under a number of its own.
        script, numbers = script.with_again(0, warm_up), [len(numbers), *numbers]
    loop = make_loop(
        cluster, script, speculation, overhead_per_hop=overhead_per_hop, host=host, prefill_chunk=prefill_chunk
    )
    done = []
    for number in numbers:
        strategy = make_strategy(speculation, len(cluster.stages))
        done.append(simulate_one(loop, script, number, strategy))
    return done[1:] if warm_up else done


def simulate_serving(
    cluster: Cluster,
    script: Script,
    speculation: SpeculativeConfig | None,
    concurrency: int,
    results: Link | None = None,
) -> list[Timed]:
    """Run every request of the script, always ``concurrency`` of them together: when one ends the next one comes.

    Returns the times at which each came and its tokens did, in virtual seconds. Results take ``results`` to the engine,
    or the cluster's link without it. Raises like ``simulate``.
    """
    loop = make_loop(cluster, script, speculation, concurrency, results=results)
    runs: list[Timed] = []
    while loop.busy or len(runs) < len(script.picks):
        while len(loop.requests) < concurrency and len(runs) < len(script.picks):
            runs.append(Timed(queued=loop.clock.now()))
            strategy = make_strategy(speculation, len(cluster.stages))
            loop.add(scripted(script, len(runs) - 1, strategy, runs[-1]))
        loop.step()
    return runs


def scripted(script: Script, number: int, strategy: Strategy, timed: Timed) -> Request:
    """A request of the script, whose tokens' times go into ``timed``."""
    prompt, tokens = script.prompts[number], len(script.picks[number])
    return Request(number, [0] * prompt, Sampling(), tokens, frozenset(), strategy, timed)


def simulate_one(loop: EngineLoop, script: Script, number: int, strategy: Strategy) -> Simulated:
    """Run one request of the script, until nothing of it is in flight."""
    timed, watch, started = Timed(), Watch(), loop.clock.now()
    loop.observers = [watch]
    request = scripted(script, number, strategy, timed)
    loop.add(request)
    while loop.busy:
        loop.step()
    loop.drain()
    first, last = timed.moments[0], timed.moments[-1]
    return Simulated(
        tokens=len(timed.moments),
        seconds=last - first,
        first_token_seconds=first - started,
        stages_busy=busy_share(watch.stages, first, last) / loop.pipeline.stages,
        drafter_busy=busy_share(watch.drafter, first, last),
        rows=request.metrics.rows_entered - len(request.prompt),
        metrics=request.metrics,
    )


def busy_share(spans: Sequence[tuple[float, float]], first: float, last: float) -> float:
    """Share of the time from ``first`` to ``last`` that spans cover, overlaps counted twice; 0 for no time."""
    covered = sum([min(end, last) - max(start, first) for start, end in spans if start < last and end > first])
    return covered / (last - first) if last > first else 0.0


def make_loop(
    cluster: Cluster,
    script: Script,
    speculation: SpeculativeConfig | None,
    concurrency: int = 1,
    overhead_per_hop: float = 0.0,
    host: SharedHost | None = None,
    prefill_chunk: int | None = None,
    results: Link | None = None,
) -> EngineLoop:
    """An engine on modelled devices for a number of concurrent requests; see ``simulate`` and ``simulate_serving``."""
    clock = VirtualClock()
    timings = stage_timings(cluster)
    links = [longer(link, overhead_per_hop) for link in link_timings(cluster)]
    last = len(timings) - 1
    stages = [StageEmulation(timing=timing, up=links[i], down=links[i + 1]) for i, timing in enumerate(timings)]
    cores = [SimulatedCore(script, i == last) for i in range(len(timings))]
    drivers: Sequence[StageDriver]
    down = links_down(cluster, links)
    down[-1] = results or down[-1]
    if host is None:
        drivers = [emulated_driver(i, cores[i], clock.now, stage, down[i]) for i, stage in enumerate(stages)]
    else:
        between = [Links(down[i], link_of(stage.up)) for i, stage in enumerate(stages)]
        drivers = shared_drivers(host, cores, clock.now, timings, between)
    pipeline = SimulatedPipeline(drivers, clock, LinkModel(links[0]))
    drafter = None
    if speculation is not None:
        timing, link = draft_timing(cluster), draft_link(cluster)
        assert timing is not None
        assert link is not None
        drafter = EmulatedDrafter(ScriptedDrafter(script), timing, longer(link, overhead_per_hop), clock)
        if cluster.drafting_stage is not None:
            drafter.share(DeviceTurns(pipeline, cluster.drafting_stage))
    most_rows = speculation.strategy_options.most_rows if speculation is not None else 0
    longest = max(prompt + len(picks) for prompt, picks in zip(script.prompts, script.picks, strict=True))
    pool = SlotPool(longest * concurrency, speculative_slots(len(timings), most_rows), sharing=False)
    pieces = PieceTable(timings, links) if prefill_chunk is None else None
    scheduler = Scheduler(pool, prefill_chunk or BATCH_ROWS, concurrency, longest, pieces=pieces)
    # The pipeline is the loop's clock as well.
    estimates = Estimates(contended=host is not None, stages=pipeline.stages)
    return EngineLoop(pipeline, drafter, scheduler, pipeline, estimates=estimates)


def links_down(cluster: Cluster, timings: Sequence[LinkTiming]) -> list[Link]:
    """The links from each stage to the next, and from the last one to the engine.

    Where links are exclusive, hidden states occupy the devices at both ends. Rows and results of the engine do not:
    they are a few hundred bytes, which PipeDec sends beside its tensors, over Redis.
    """
    if not cluster.links.exclusive:
        return [LinkModel(timing) for timing in timings[1:]]
    nodes = {device.name: Port() for device in cluster.devices}
    hops, between = cluster.route()[1:-1], timings[1:-1]
    found: list[Link] = [
        ExclusiveLink(timing, nodes[one], nodes[other]) for (one, other), timing in zip(hops, between, strict=True)
    ]
    return [*found, LinkModel(timings[-1])]


def longer(link: LinkTiming, seconds: float) -> LinkTiming:
    """The link with ``seconds`` more latency."""
    return msgspec.structs.replace(link, latency_s=link.latency_s + seconds)


# ---------------------------------------------------------------------------------------------------------- shared host
# Stages on one host, in virtual time: they share its cores and its memory's bandwidth with each other and with others.

TICK: Final = 1e-9
"""Seconds of remaining work below which a batch is done: rounding leaves no less."""


@dataclass(frozen=True, kw_only=True)
class SharedHost:
    """The resources that stages share. Raises FieldError for values that no host has."""

    cores: int = 2
    """Number of cores; a stage that computes takes one."""
    streams: float | None = None
    """Stages that the memory feeds with weights at full speed; more of them share that. None: any number."""
    busy: Sequence[tuple[float, int]] = ((0.0, 0),)
    """(time, count): from this virtual time in seconds, so many other processes compute; the first time is 0."""

    def __post_init__(self) -> None:
        check_positive(self, "cores", "streams")
        since = [at for at, _ in self.busy]
        check(since[:1] == [0.0] and since == sorted(since), "busy", list(self.busy), "moments from 0 on, in order")

    def speed(self, stages: int, at: float) -> float:
        """Speed of each of ``stages`` computing stages at a time, in proportion to a stage that has the host alone.

        Cores are shared evenly by all stages and processes that compute.
        """
        others = next(count for since, count in reversed(self.busy) if since <= at)
        fed = 1.0 if self.streams is None else self.streams / stages
        return min(1.0, fed, self.cores / (stages + others))

    def next_change(self, at: float) -> float:
        """The next time at which other processes come or go."""
        return next((since for since, _ in self.busy if since > at), math.inf)


class Computing:
    """The batches that a host's stages compute, each with the seconds that it would still take alone."""

    def __init__(self, host: SharedHost, clock: Callable[[], float]) -> None:
        self._host = host
        self._clock = clock
        self._left: dict[int, float] = {}
        """Remaining seconds by stage."""
        self._at = 0.0

    def begin(self, stage: int, seconds: float) -> None:
        """Begin a stage's batch, which would take ``seconds`` alone."""
        self._advance()
        if seconds > TICK:
            self._left[stage] = seconds

    def has(self, stage: int) -> bool:
        return stage in self._left

    def due(self, stage: int) -> float:
        """The time at which a stage's batch is done, if neither another batch nor a process begins or ends before."""
        self._advance()
        speed = self._host.speed(len(self._left), self._at)
        return min(self._at + self._left[stage] / speed, self._host.next_change(self._at))

    def end(self, stage: int) -> bool:
        """Remove a stage's batch if it is done. Returns whether it was."""
        self._advance()
        if self._left[stage] > TICK:
            return False
        del self._left[stage]
        return True

    def _advance(self) -> None:
        """Advance all batches to now. Called whenever one begins or ends, so that speeds are constant in between."""
        now = self._clock()
        while self._at < now:
            # Speeds are constant only until other processes come or go.
            until = min(now, self._host.next_change(self._at))
            done = (until - self._at) * self._host.speed(max(1, len(self._left)), self._at)
            self._left = {stage: max(0.0, left - done) for stage, left in self._left.items()}
            self._at = until


class SharedDevice(Device):
    """A stage's share of a shared host. The end of a batch depends on the other stages: its driver finds it out."""

    def __init__(self, stage: int, clock: Callable[[], float], timing: StageTiming, computing: Computing) -> None:
        super().__init__(clock)
        self._stage = stage
        self._timing = timing
        self._computing = computing

    def computed(self, start: float, rows: Rows, alive: Sequence[int]) -> Computation:
        alone = self._timing.seconds(len(alive), attended_by(rows, alive))
        self._computing.begin(self._stage, alone)
        return Computation(start, 0.0, alone)


class SharedDriver(StageDriver):
    """A stage's driver on a shared host, where a batch is done when the host has computed it."""

    def __init__(self, index: int, core: Core, device: SharedDevice, computing: Computing, links: Links) -> None:
        super().__init__(index, core, computing._clock, device, links)
        self._computing = computing

    @property
    def due(self) -> float | None:
        """When to step next. Other stages' steps may change it, so that it has to be asked for again after each."""
        return self._computing.due(self.index) if self._computing.has(self.index) else super().due

    def step(self) -> Iterator[Outgoing]:
        if self._computing.has(self.index):
            if not self._computing.end(self.index):
                return
            self._note_end(self.clock())
            self._settle()
        yield from super().step()

    def _settle(self) -> None:
        if not self._computing.has(self.index):
            super()._settle()

    def _note_end(self, now: float) -> None:
        """Write the actual end of a batch into its message: it was not known when the message was made."""
        assert self._done is not None
        message = self._done.outgoing.message
        assert isinstance(message, Batch | Result)
        spans = [*message.spans[:-1], msgspec.structs.replace(message.spans[-1], end=now)]
        message = msgspec.structs.replace(message, spans=spans)
        self._done = self._done._replace(end=now, outgoing=self._done.outgoing._replace(message=message))


def shared_drivers(
    host: SharedHost,
    cores: Sequence[Core],
    clock: Callable[[], float],
    timings: Sequence[StageTiming],
    links: Sequence[Links],
) -> list[SharedDriver]:
    """A driver for every stage, all on one host."""
    computing = Computing(host, clock)
    devices = [SharedDevice(i, clock, timing, computing) for i, timing in enumerate(timings)]
    return [SharedDriver(i, core, devices[i], computing, links[i]) for i, core in enumerate(cores)]
