"""A stage as a process: loads its layers, then turns messages from its inbox into messages to its neighbours."""

from __future__ import annotations

import logging
import time
import traceback

from penstock.emulation.stage import share_host
from penstock.messages import (
    Batch,
    ConnectNeighbours,
    Failed,
    Features,
    ForeignFrame,
    Frame,
    Heartbeat,
    HeartbeatAck,
    LinkBroken,
    Loading,
    MalformedMessage,
    Message,
    Started,
    Stop,
    decode,
    encode,
)
from penstock.pipeline.assembly import load_layers, make_core, make_driver
from penstock.pipeline.grammars import GrammarDesk
from penstock.pipeline.memory import returned_at_once
from penstock.pipeline.plan import StageSpec
from penstock.stage.driver import Core, Outgoing
from penstock.transport.inbox import Inbox
from penstock.transport.outbox import Outbox
from penstock.transport.sockets import Sockets
from penstock.transport.waiting import sleep_until, slept_until

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
    with Sockets(spec.security, spec.private_network) as sockets, sockets.inbox(spec.bind) as inbox:
        inbox.admit(spec.session)
        engine = sockets.connect(spec.engine, spec.session)
        linger = 0.0
        try:
            Worker(spec, sockets, inbox, engine).serve()
        except Exception as error:
            details = traceback.format_exc()
            cause = f"{type(error).__name__}: {error}"
            engine.send(encode(Failed(stage=spec.index, cause=cause, details=details), spec.session))
            linger = FLUSH_S
            raise
        finally:
            sockets.close(linger)


class Worker:
    """One stage at its sockets."""

    def __init__(self, spec: StageSpec, sockets: Sockets, inbox: Inbox, engine: Outbox) -> None:
        self._spec = spec
        self._inbox = inbox
        self._sockets = sockets
        self._outboxes: dict[str, Outbox] = {"engine": engine}
        """By where a message goes: "engine", "upstream", "downstream" and "drafter", as far as they are known."""
        self._packed: tuple[Outgoing, Frames] | None = None
        """What leaves next, as it does."""
        self._wired = self._stopped = self._acknowledged = False
        """The last: the engine has taken in the latest heartbeat, or waits for the first one."""
        with returned_at_once():
            layers = load_layers(spec.plan, self._tell_reading)
        self._width = layers.hidden_size  # looked up once: a checkpoint's configuration takes as long as a message
        core = self._framed(make_core(spec.plan, spec.index, spec.stages, layers))
        self._driver = make_driver(spec.plan, spec.index, core, time.monotonic)
        if spec.plan.tap is not None:
            self._outboxes["drafter"] = sockets.connect(spec.plan.tap.address, spec.plan.tap.session)
        self._grammars = GrammarDesk(layers.grammars, inbox, self._tell_engine)
        started = Started(
            stage=spec.index, address=inbox.address, kv_bytes=layers.kv_bytes, weight_bytes=layers.weight_bytes
        )
        self._tell_engine(started)
        self._beat_at = time.monotonic() + HEARTBEAT

    def _framed(self, core: Core) -> Core:
        from penstock.stage.tensors import FramedCore

        plan = self._spec.plan
        framed = FramedCore(core, plan.dtype, plan.device)
        return framed if plan.emulation is None else share_host(framed, plan.emulation)

    def _tell_reading(self, read: int, total: int) -> None:
        self._tell_engine(Loading(stage=self._spec.index, read=read, total=total))

    def _tell_engine(self, message: Message) -> None:
        self._outboxes["engine"].send(encode(message, self._spec.session))

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
        """Until something is due: no message makes that earlier, unless the device is shared. Else for a message.

        Or until the next heartbeat, which takes microseconds: what is due stays due at its moment.
        """
        due = self._driver.due if self._wired else None
        until = self._beat_at if due is None else min(due, self._beat_at)
        if due is None or self._driver.device.shared:
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
        if self._inbox.broken() and not self._stopped:
            self._tell_engine(LinkBroken(stage=self._spec.index))

    def _beat(self) -> None:
        """Tell the engine that this loop goes round, unless it has not even taken in the last time."""
        if time.monotonic() < self._beat_at:
            return
        self._beat_at = time.monotonic() + HEARTBEAT
        if self._acknowledged:
            self._tell_engine(Heartbeat(stage=self._spec.index))
            self._acknowledged = False

    def _receive(self, frames: list[Frame]) -> None:
        try:
            delivery = decode(frames, self._spec.session)
        except ForeignFrame as error:
            log.warning("stage %d refused a frame: %s", self._spec.index, error)
            return
        message = delivery.message
        if isinstance(message, Batch):
            self._driver.on_message(message, self._hidden_states(message, frames), delivery.arrives)
        elif isinstance(message, Stop):
            self._stopped = True
        elif isinstance(message, ConnectNeighbours):
            self._outboxes["upstream"] = self._sockets.connect(message.upstream, self._spec.session)
            self._outboxes["downstream"] = self._sockets.connect(message.downstream, self._spec.session)
            self._wired = self._acknowledged = True
        elif isinstance(message, HeartbeatAck):
            self._acknowledged = True
        elif isinstance(message, Features):
            self._driver.on_message(message, frames[1] if message.nodes else None, delivery.arrives)
        elif not self._grammars.on_message(message):
            self._driver.on_message(message, None, delivery.arrives)

    def _hidden_states(self, batch: Batch, frames: list[Frame]) -> Frame | None:
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
        self._outboxes[outgoing.to].send(*frames)

    def _frames(self, outgoing: Outgoing) -> Frames:
        message, plan, session = outgoing.message, self._spec.plan, self._spec.session
        if outgoing.to == "drafter":
            assert plan.tap is not None
            session = plan.tap.session
        if outgoing.tensor is None or not isinstance(message, Batch | Features):
            return (encode(message, session, outgoing.arrives),)
        message.width = self._width * (len(message.layers) if isinstance(message, Features) else 1)
        message.dtype = plan.dtype
        return encode(message, session, outgoing.arrives), outgoing.tensor
