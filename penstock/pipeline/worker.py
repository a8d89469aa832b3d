"""A stage as a process: loads its layers, then turns messages from its inbox into messages to its neighbours."""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable
from typing import Any

from penstock.messages import (
    Batch,
    ConnectNeighbours,
    Failed,
    Features,
    ForeignFrame,
    Heartbeat,
    HeartbeatAck,
    MalformedMessage,
    Occupied,
    Started,
    Stop,
    decode,
    encode,
)
from penstock.pipeline.inbox import Inbox, Outbox, sleep_until, slept_until
from penstock.pipeline.plan import StagePlan, StageSpec
from penstock.pipeline.sockets import Sockets
from penstock.priority import STAGE, keep_time
from penstock.stage.background import BackgroundCore
from penstock.stage.core import StageCore
from penstock.stage.driver import Core, Outgoing, StageDriver

log = logging.getLogger(__name__)

HEARTBEAT = 1.0
"""Seconds between a stage's signs of life."""
LOOK_AHEAD = 5e-4
"""Seconds before something is due at which a stage takes in what has come: then only the due thing is left to do."""
FLUSH_S = 1.0
"""Seconds that a stage which failed waits for the engine to hear of it. One told to stop has nothing to say."""


Frames = tuple[bytes] | tuple[bytes, memoryview]


def run(spec: StageSpec) -> None:
    """Serve until told to stop. Any error is reported to the engine before the process ends with it."""
    with Sockets() as sockets, sockets.inbox(spec.bind) as inbox:
        engine = sockets.connect(spec.engine)
        last_words = 0.0
        try:
            Worker(spec, sockets, inbox, engine).serve()
        except Exception as error:
            details = traceback.format_exc()
            cause = f"{type(error).__name__}: {error}"
            engine.send(encode(Failed(stage=spec.index, cause=cause, details=details), spec.session))
            last_words = FLUSH_S
            raise
        finally:
            sockets.close(last_words)


def load(plan: StagePlan) -> Any:
    """The stage's layers, or the learned drafter's module."""
    from penstock.models.stage_model import load_stage

    if plan.target:
        from penstock.models.speculators.stage import load_speculator_stage

        return load_speculator_stage(
            plan.model, plan.target, capacity=plan.capacity, dtype=plan.dtype, device=plan.device
        )
    return load_stage(
        plan.model,
        plan.first,
        plan.last,
        capacity=plan.capacity,
        dtype=plan.dtype,
        device=plan.device,
        max_model_len=plan.max_model_len,
        tokenizer=plan.tokenizer,
    )


def make_driver(
    plan: StagePlan,
    index: int,
    stages: int,
    model: Any,
    clock: Callable[[], float],
    within: Callable[[Core], Core] = lambda core: core,
) -> StageDriver:
    """Drives ``model``, which ``load`` gave, as stage ``index`` of so many. ``within``: what its core is wrapped in."""
    taps = plan.tap.layers if plan.tap is not None else ()
    if taps:
        model.tap(taps)
    core = StageCore(model, plan.capacity, is_last=index == stages - 1, taps=taps)
    if plan.target:
        core.reader = model
    aside = plan.tap.link if plan.tap is not None else None
    return StageDriver(index, within(core), clock, plan.timing, plan.down, plan.up, aside)


class Worker:
    """One stage at its sockets."""

    def __init__(self, spec: StageSpec, sockets: Sockets, inbox: Inbox, engine: Outbox) -> None:
        self._spec = spec
        self._inbox = inbox
        self._sockets = sockets
        self._engine = self._upstream = self._downstream = engine
        self._packed: tuple[Outgoing, Frames] | None = None
        """What leaves next, as it does."""
        self._wired = self._stopped = self._acknowledged = False
        """The last: the engine has taken in the latest heartbeat, or waits for the first one."""
        self._model = load(spec.plan)
        self._width = self._model.hidden_size  # looked up once: a checkpoint's configuration takes as long as a message
        if spec.plan.background:
            keep_time(STAGE)
        self._driver = make_driver(spec.plan, spec.index, spec.stages, self._model, time.monotonic, self._framed)
        if spec.plan.tap is not None:
            self._to_drafter = sockets.connect(spec.plan.tap.address)
        started = Started(
            stage=spec.index,
            address=inbox.address,
            kv_bytes=self._model.kv_bytes,
            weight_bytes=self._model.weight_bytes,
        )
        engine.send(encode(started, spec.session))
        self._beat_at = time.monotonic() + HEARTBEAT

    def _framed(self, core: Core) -> Core:
        from penstock.stage.tensors import FramedCore

        framed = FramedCore(core, self._spec.plan.dtype, self._spec.plan.device)
        return BackgroundCore(framed) if self._spec.plan.background else framed

    def serve(self) -> None:
        while not self._stopped:
            self._wait()
            # What has been computed leaves before anything is looked at that came meanwhile and cannot change it.
            if self._wired and (leaving := self._driver.leave()) is not None:
                self._send(leaving)
            self._look()
            # A neighbour's first batch may overtake the engine's ConnectNeighbours: it waits in the driver.
            for outgoing in self._driver.step() if self._wired else ():
                self._send(outgoing)
            self._beat()

    def _wait(self) -> None:
        """Until something is due: no message but a drafter's pass makes that earlier. Else for a message.

        Or until the next heartbeat, which takes microseconds: what is due stays due at its moment.
        """
        due = self._driver.due if self._wired else None
        until = self._beat_at if due is None else min(due, self._beat_at)
        if due is None or self._spec.plan.shared:
            self._inbox.wait(until)
            return
        if (leaving := self._driver.leaving) is not None and (self._packed is None or self._packed[0] is not leaving):
            self._packed = leaving, self._frames(leaving)
        if slept_until(until - LOOK_AHEAD):
            self._look()
        sleep_until(until)

    def _look(self) -> None:
        """Take in what has come."""
        for frames in self._inbox.take():
            self._receive(frames)

    def _beat(self) -> None:
        """Tell the engine that this loop goes round, unless it has not even taken in the last time."""
        if time.monotonic() < self._beat_at:
            return
        self._beat_at = time.monotonic() + HEARTBEAT
        if self._acknowledged:
            self._engine.send(encode(Heartbeat(stage=self._spec.index), self._spec.session))
            self._acknowledged = False

    def _receive(self, frames: list[bytes]) -> None:
        try:
            message = decode(frames, self._spec.session)
        except ForeignFrame as error:
            log.warning("stage %d refused a frame: %s", self._spec.index, error)
            return
        if isinstance(message, Batch):
            self._driver.on_message(message, self._hidden_states(message, frames))
        elif isinstance(message, Stop):
            self._stopped = True
        elif isinstance(message, ConnectNeighbours):
            self._upstream = self._sockets.connect(message.upstream)
            self._downstream = self._sockets.connect(message.downstream)
            self._wired = self._acknowledged = True
        elif isinstance(message, HeartbeatAck):
            self._acknowledged = True
        elif isinstance(message, Features):
            self._driver.on_message(message, frames[1] if message.nodes else None)
        else:
            self._driver.on_message(message)

    def _hidden_states(self, batch: Batch, frames: list[bytes]) -> bytes | None:
        """What came with a batch: a line per surviving row, except from the engine, which sends tokens only."""
        if self._spec.index == 0 or not batch.alive:
            return None
        if (batch.dtype, batch.width) != (self._spec.plan.dtype, self._width):
            raise MalformedMessage(f"batch {batch.stream} brings {batch.dtype or 'no'} states of width {batch.width}")
        return frames[1]

    def _send(self, outgoing: Outgoing) -> None:
        if self._packed is not None and self._packed[0] is outgoing:
            frames, self._packed = self._packed[1], None
        else:
            frames = self._frames(outgoing)
        self._outbox(outgoing).send(*frames)

    def _outbox(self, outgoing: Outgoing) -> Outbox:
        if outgoing.to_drafter:
            return self._to_drafter
        if isinstance(outgoing.message, Occupied):
            return self._engine
        return self._upstream if outgoing.upstream else self._downstream

    def _frames(self, outgoing: Outgoing) -> Frames:
        message, session = outgoing.message, self._spec.session
        if outgoing.to_drafter:
            assert self._spec.plan.tap is not None
            session = self._spec.plan.tap.session
        if outgoing.tensor is None or not isinstance(message, Batch | Features):
            return (encode(message, session),)
        message.width = self._width * (len(message.layers) if isinstance(message, Features) else 1)
        message.dtype = self._spec.plan.dtype
        return encode(message, session), outgoing.tensor
