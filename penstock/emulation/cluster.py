"""The emulated parts of an engine by its cluster file, and the host that they are on."""

from __future__ import annotations

import math
from collections.abc import Sequence

from msgspec.structs import replace

from penstock.cluster import (
    Cluster,
    draft_link,
    draft_timing,
    feature_links,
    link_timings,
    speculator_timing,
    stage_timings,
)
from penstock.cluster.timing import Attended, LinkTiming, StageTiming
from penstock.core import ConfigError
from penstock.drafters.base import Draft, Drafter, DraftRequest, Weights
from penstock.drafters.merged import MergedDrafter
from penstock.emulation.stage import StageEmulation
from penstock.estimates.estimates import DraftQuality, DraftTiming
from penstock.messages import DeviceReserved, Message, ReserveDevice
from penstock.pipeline.base import Clock, SideChannel, StagePlan
from penstock.pipeline.processes import ProcessExecutor, ProcessPipeline
from penstock.requests.request import Request
from penstock.speculation import SpeculativeConfig

# ---------------------------------------------------------------------------------------------------------------- turns
# How a drafter uses a stage's device: it requests a turn, and is told when the device has taken the pass.


class DeviceTurns:
    """Turns on the device of one stage of a pipeline, one at a time."""

    def __init__(self, channel: SideChannel, stage: int) -> None:
        self._channel = channel
        self._stage = stage
        self._taken: DeviceReserved | None = None
        channel.listen(self._on_message)

    def ask(self, seconds: float, arrives: float) -> None:
        """Request a turn for a pass of ``seconds``. The message arrives at the moment ``arrives`` of the clock."""
        self._channel.tell(self._stage, ReserveDevice(seconds=seconds), arrives)

    def taken(self) -> DeviceReserved | None:
        """The turn that the device has given to the pass; None before, and None again once it has been returned."""
        taken, self._taken = self._taken, None
        return taken

    def _on_message(self, message: Message) -> bool:
        if not isinstance(message, DeviceReserved):
            return False
        self._taken = message
        return True


# -------------------------------------------------------------------------------------------------------------- drafter
# A drafter on a modelled device: its answers are held back until that device would have given them.


class EmulatedDrafter:
    """Wraps any drafter, and counts as an overrun each answer that really took longer than its modelled time.

    A round is one pass. It begins when the question and the features that its rows wait for have arrived. After
    ``share`` it also waits for its turn on the device. The turn is requested with the question, before the features are
    there; the model ignores that the device could do something else until then.
    """

    def __init__(self, drafter: Drafter, timing: StageTiming, link: LinkTiming | None, clock: Clock) -> None:
        self.inner = drafter
        self.asks = 0
        self.overruns = 0
        self._timing = timing
        self._link = link
        self._clock = clock
        self._answers: list[Draft] = []
        self._waiting = False
        self._link_s = self._pass_s = 0.0
        """Seconds of the current round: its question or its answer on the link, and its pass on the device."""
        self._asked_at = self._begins_at = 0.0
        """Times at which the question arrives and the device begins the pass; infinite while they are not known."""
        self._turns: DeviceTurns | None = None
        self._turn: DeviceReserved | None = None

    def share(self, turns: DeviceTurns) -> None:
        """Let the drafter's passes and the batches of a stage take turns on one device from now on.

        A pass that still waits for its turn on an earlier device, which has been lost, begins now.
        """
        self._turns = turns
        self._begins_at = min(self._begins_at, self._clock.now())

    @property
    def reads_target(self) -> bool:
        return self.inner.reads_target

    @property
    def rows_per_node(self) -> int:
        return self.inner.rows_per_node

    @property
    def free(self) -> bool:
        return False

    @property
    def busy(self) -> bool:
        return self._waiting

    @property
    def timing(self) -> DraftTiming:
        """The modelled times of the current round."""
        at = self.inner.timing.features_at
        features, device = max(0.0, at - self._asked_at), self._begins_at - self._asked_at
        return DraftTiming(features, at, device, self._pass_s, self._turn)

    def ask(self, asks: Sequence[DraftRequest]) -> int:
        started = self._clock.now()
        rows = self.inner.ask(asks)
        # Without rows the drafter has answered at the engine, from what it knows already.
        self._link_s = self._link.seconds(rows) if self._link is not None and rows else 0.0
        self._pass_s = self._timing.seconds(rows, attended_by_asks(asks, rows))
        self._asked_at = self._begins_at = started + self._link_s
        self._turn = None
        if self._turns is not None and rows:
            self._turns.ask(self._pass_s, self._asked_at)
            # Infinite until the stage grants the turn: ``_until`` then gives no moment, and ``due`` none to wake at.
            self._begins_at = math.inf
        self.asks += 1
        self._waiting = True
        return rows

    def poll(self) -> list[Draft]:
        if not self._waiting:
            return []
        # Whether the real answer came just now has to be known before ``poll`` takes it.
        was_busy = self.inner.busy
        self._answers += self.inner.poll()
        if self._turns is not None and (turn := self._turns.taken()) is not None:
            self._turn, self._begins_at = turn, turn.start
        now, until = self._clock.now(), self._until
        if was_busy and not self.inner.busy and now > until:
            self.overruns += 1
        if self.inner.busy or now < until:
            return []
        self._waiting = False
        answers, self._answers = self._answers, []
        return answers

    @property
    def _until(self) -> float:
        """Time at which the answer arrives, by the turn and the features that are known so far."""
        return max(self._begins_at, self.inner.timing.features_at) + self._pass_s + self._link_s

    @property
    def due(self) -> float | None:
        if not self._waiting:
            return None
        due = self.inner.due if self.inner.busy else self._until
        return due if due != math.inf else None

    def calibrate_by(self, quality: DraftQuality) -> None:
        self.inner.calibrate_by(quality)

    def prepare_grammar(self, request: Request) -> None:
        self.inner.prepare_grammar(request)

    def has_grammar(self, request: Request) -> bool:
        return self.inner.has_grammar(request)

    def forget(self, request: Request) -> None:
        self.inner.forget(request)

    def close(self) -> None:
        self.inner.close()


def attended_by_asks(asks: Sequence[DraftRequest], rows: int) -> Attended:
    """Attention pairs and distinct tokens read by one pass over the nodes asked about.

    Rows beyond those nodes are tokens of the texts that the drafter has not read yet: on average each sees half a text.
    """
    positions = [node.position for ask in asks for node in ask.nodes]
    texts = sum(max((node.position + 1 for node in ask.nodes), default=0) for ask in asks)
    lacking = max(0, rows - len(positions)) * texts / (2 * max(1, len(asks)))
    return Attended(sum(positions) + len(positions) + lacking, texts)


# -------------------------------------------------------------------------------------------------------------- cluster
# The emulated parts of an engine by its cluster file: stages, links and the drafter. Everything else is real.


def stage_emulations(
    cluster: Cluster | None,
    stages: int,
    drafter: Drafter | None = None,
    *,
    features: bool = False,
    apart: bool = False,
) -> list[StageEmulation | None]:
    """One entry per stage, None where nothing is emulated.

    ``features``: whether the stages send features to a learned drafter. ``apart``: whether stages are on several hosts.
    Raises ConfigError where the cluster file lacks a link.
    """
    if cluster is None or not cluster.emulated:
        return [None] * stages
    links, shared = link_timings(cluster), shared_stage(cluster, drafter)
    to_drafter = feature_links(cluster) if features else [None] * stages
    return [
        StageEmulation(
            timing=timing,
            up=links[i],
            down=links[i + 1],
            to_drafter=to_drafter[i],
            shared=i == shared,
            apart=apart,
        )
        for i, timing in enumerate(stage_timings(cluster))
    ]


def check_drafter(cluster: Cluster, speculation: SpeculativeConfig | None) -> None:
    """Raise ConfigError unless the emulated cluster says how long drafting takes."""
    priced_as = speculation.drafter_options.priced_as if speculation is not None else Weights.NONE
    if priced_as is Weights.SPECULATOR:
        if cluster.drafter is None:
            raise ConfigError(f"cluster {cluster.name} names no drafter: what drafting takes there is unknown")
        feature_links(cluster)  # refuses a cluster in which a stage and the drafter are not joined
    if priced_as is Weights.DRAFT_MODEL and cluster.draft_as_model is None:
        raise ConfigError(
            f"cluster {cluster.name} names no drafter and no draft_as_model: what drafting takes there is unknown"
        )


def drafter_pass(cluster: Cluster | None, depth: int | None) -> StageTiming | None:
    """The time of one pass on the cluster's modelled device for the drafter; None where there is none.

    ``depth`` is how many layers a learned drafter has, None for a draft model.
    """
    if cluster is None:
        return None
    return draft_timing(cluster) if depth is None else speculator_timing(cluster, depth)


def drafter_emulation(cluster: Cluster | None, depth: int | None) -> StageEmulation | None:
    """The emulation of the drafter's process, which adds no times of its own: ``on_its_device`` does."""
    return None if drafter_pass(cluster, depth) is None else StageEmulation()


def on_its_device(cluster: Cluster | None, drafter: Drafter, depth: int | None, clock: Clock) -> Drafter:
    """The drafter on the cluster's modelled device, or unchanged if there is none. ``depth``: see ``drafter_pass``."""
    timing = drafter_pass(cluster, depth)
    if cluster is None or timing is None:
        return drafter
    return EmulatedDrafter(drafter, timing, draft_link(cluster), clock)


def off_its_device(drafter: Drafter | None) -> Drafter | None:
    """Undo ``on_its_device``: the drafter without its modelled device and without prompt lookup beside it."""
    modelled = modelled_drafter(drafter)
    return modelled.inner if modelled is not None else without_lookup(drafter)


def modelled_drafter(drafter: Drafter | None) -> EmulatedDrafter | None:
    """The drafter on its modelled device, if it has one. Prompt lookup beside it runs on no device."""
    own = without_lookup(drafter)
    return own if isinstance(own, EmulatedDrafter) else None


def without_lookup(drafter: Drafter | None) -> Drafter | None:
    """The drafter without prompt lookup beside it."""
    return drafter.inner if isinstance(drafter, MergedDrafter) else drafter


def take_turns(cluster: Cluster | None, drafter: Drafter | None, pipeline: SideChannel) -> None:
    """Let the drafter and a stage take turns on one modelled device, if the cluster places the drafter there."""
    stage, modelled = shared_stage(cluster, drafter), modelled_drafter(drafter)
    if stage is not None and modelled is not None:
        modelled.share(DeviceTurns(pipeline, stage))


def shared_stage(cluster: Cluster | None, drafter: Drafter | None) -> int | None:
    """The stage whose modelled device the drafter uses, too; None if the drafter has a device of its own."""
    return cluster.drafting_stage if cluster is not None and modelled_drafter(drafter) is not None else None


# ----------------------------------------------------------------------------------------------------------------- host
# Stage processes that keep their modelled times at real-time priority, for benches.


class RealTimeExecutor(ProcessExecutor):
    """Starts emulated stages that run ahead of everything else on this host, where Linux permits it
    (``emulation/stage.py``)."""

    def begin(self, plans: Sequence[StagePlan], name: str = "stage") -> ProcessPipeline:
        return super().begin([in_real_time(plan) for plan in plans], name)


def in_real_time(plan: StagePlan) -> StagePlan:
    """The plan with real-time priority if its stage is emulated; a real stage has no modelled times to keep."""
    if plan.emulation is None:
        return plan
    return replace(plan, emulation=replace(plan.emulation, real_time=True))
