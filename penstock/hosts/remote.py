"""Another host, as a head has it: what its agent starts, what has become of that, and whether it is still there."""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Collection, Sequence
from typing import Final

from penstock.config import FieldError
from penstock.hosts import control
from penstock.hosts.facts import HostFacts
from penstock.hosts.offsets import Offsets
from penstock.hosts.weights.ranges import Layers
from penstock.pipeline.forking import exit_report
from penstock.pipeline.plan import StageSpec
from penstock.transport.addresses import place_of
from penstock.transport.outbox import Outbox
from penstock.transport.sockets import Sockets

log = logging.getLogger(__name__)

ANSWER_S: Final = 10.0
"""Seconds within which an agent has to answer."""
TRY_AGAIN_S: Final = 3.0
"""Seconds after which a host that was lost is asked again: twice as long after the second loss."""
MOST_LOSSES: Final = 3
LOSSES_WITHIN_S: Final = 600.0
"""A host that is lost so often in so many seconds is left alone for as long, unless no other one is there."""


class RemoteHost:
    """A launcher (``pipeline/launching.py``) of stages on the host named ``name``, HOST or HOST:PORT.

    ``attach`` begins a lease, ``lose`` ends it with all that was started under it. ``facts`` are there once the agent
    has answered; a host that comes back has new ones.
    """

    def __init__(self, name: str, sockets: Sockets) -> None:
        self.name = name
        self.facts: HostFacts | None = None
        self.offsets = Offsets()
        self.checkpoints: dict[str, str] = {}
        """What the agent has said of checkpoints, by path: a problem, or nothing."""
        self.fetching: set[str] = set()
        """Paths of those that it is being sent."""
        self.asked: dict[str, control.FindCheckpoint] = {}
        """By path, what it has been asked for."""
        self.lease = ""
        """Its latest one's secret."""
        self.attached = False
        """Whether that has not ended: the agent has answered, or may yet."""
        self.cause = ""
        """Why the latest lease that has ended did."""
        self.cut_off = ""
        """Why it is to be lost, though it answers. May be set by any thread."""
        self._sockets = sockets
        self._host, self.address = places_of(name)
        """The latter: its agent's, in numbers."""
        self._outbox: Outbox | None = None
        self._listeners: dict[str, int] = {}
        """By the names of processes, whom to tell of their ends."""
        self._running: set[str] = set()
        """Those of them that have not ended."""
        self._silent = 0.0
        self._lost_at = 0.0
        self._losses: deque[float] = deque(maxlen=MOST_LOSSES)
        """Moments at which it was lost after it had been there."""
        self._lock = threading.Lock()

    # ------------------------------------------------------------------------------------------------- as a launcher

    @property
    def alive(self) -> bool:
        return self.attached and self.facts is not None and not self.cut_off

    @property
    def clock_offset(self) -> float:
        best = self.offsets.best
        return 0.0 if best is None else best.seconds

    def listen(self, process: str, pipe: int) -> None:
        with self._lock:
            self._listeners[process] = pipe
            self._running.add(process)

    def forget(self, process: str) -> None:
        with self._lock:
            self._listeners.pop(process, None)
            self._running.discard(process)

    def start(self, spec: StageSpec) -> None:
        with self._lock:
            if not self.attached:
                self._report(spec.process, self.cause)
                return
        self._tell(control.StartStage(spec=spec))

    def kill(self, process: str) -> None:
        self._tell(control.KillStage(process=process))

    def ended(self, process: str) -> bool:
        with self._lock:
            return process not in self._running

    # ---------------------------------------------------------------------------------------- by the fleet's thread

    def attach(self, head: str) -> str:
        """Ask the agent to serve ``head``, an inbox's address. Returns the lease's secret."""
        self.facts, self._silent, self.cut_off = None, 0.0, ""
        self.checkpoints.clear()
        self.fetching.clear()
        self._outbox = self._sockets.connect(self.address, control.DOOR)
        self.lease, self.attached = secrets.token_hex(16), True
        self._tell(control.Attach(head=head, host=self._host))
        return self.lease

    @property
    def fault(self) -> str:
        """Why there is no connection to the agent, once that is known."""
        return self._outbox.fault if self._outbox is not None else ""

    @property
    def wants_back(self) -> bool:
        """Whether a host that was lost is to be asked again now."""
        return not self.attached and time.monotonic() >= self._lost_at + pause_after(self._losses, self._lost_at)

    @property
    def may_be_asked(self) -> bool:
        """Whether it could be asked, should there be no other one."""
        return not self.attached and time.monotonic() >= self._lost_at + TRY_AGAIN_S

    def beat(self) -> None:
        self._tell(control.Beat(sent=time.monotonic()))

    def ask_for(self, checkpoint: control.FindCheckpoint) -> None:
        self.asked[checkpoint.path] = checkpoint
        self.checkpoints.pop(checkpoint.path, None)
        self._tell(checkpoint)

    def has(self, path: str, layers: Collection[Layers]) -> bool:
        """Whether stages of these layers can load the checkpoint there."""
        return self.checkpoints.get(path) == "" and set(layers) <= set(self.asked[path].layers)

    def send(self, piece: control.Piece, content: bytes) -> None:
        if (outbox := self._outbox) is not None:
            outbox.send(control.encode(piece, self.lease), content)

    def take(self, message: control.Message) -> None:
        """What the agent says under the lease."""
        self._silent = 0.0
        if isinstance(message, control.Attached):
            self.facts = message.facts
            self.beat()
        elif isinstance(message, control.BeatAnswer):
            self.offsets.add(message.sent, message.received, message.answered, time.monotonic())
        elif isinstance(message, control.CheckpointFound) and message.fetched:
            self.fetching.add(message.path)
        elif isinstance(message, control.CheckpointFound):
            self.fetching.discard(message.path)
            self.checkpoints[message.path] = message.problem
        elif isinstance(message, control.StageEnded):
            with self._lock:
                self._report(message.process, message.cause)

    def listened(self, seconds: float) -> None:
        """The head has listened for so many seconds more."""
        self._silent += seconds
        if self.attached and self.cut_off:
            self.leave()
            self.lose(self.cut_off)
        elif self.attached and self._silent > (ANSWER_S if self.facts is None else control.LEASE):
            self.lose(f"host {self.name} was lost: it has said nothing for {control.LEASE:.1f} s")

    def lose(self, cause: str) -> None:
        """The host is not reached any more: all that it has started is lost."""
        if self.facts is not None:
            self._note_loss(cause)
        with self._lock:
            self.cause, self._lost_at = cause, time.monotonic()  # first: others read it of a host that is not attached
            self.attached, self.facts = False, None
            for process in list(self._running):
                self._report(process, cause)
        self._close_connection()

    def refuse(self, cause: str) -> None:
        """The agent that has answered is not to be used: it never counts as alive."""
        self.leave()
        self._note_loss(cause)
        self.lose(cause)

    def start_probe(self, session: str, head: str) -> None:
        """Have a probe started there that answers to ``head``, an inbox, by the host's name."""
        self._tell(control.StartProbe(name=self.name, session=session, head=head))

    def leave(self) -> None:
        """The head ends."""
        self._tell(control.Detach())

    def _note_loss(self, cause: str) -> None:
        self._losses.append(time.monotonic())
        seconds = pause_after(self._losses, self._losses[-1])
        log.warning("%s; it is asked again in %.0f s", cause, seconds)

    def _close_connection(self) -> None:
        outbox, self._outbox = self._outbox, None
        if outbox is not None:
            self._sockets.disconnect(outbox)

    def _tell(self, message: control.Message) -> None:
        if (outbox := self._outbox) is not None:
            outbox.send(control.encode(message, self.lease))

    def _report(self, process: str, cause: str) -> None:
        """That a process has ended, once."""
        if process in self._running:
            self._running.discard(process)
            os.write(self._listeners[process], exit_report(process, cause))


def pause_after(losses: Sequence[float], now: float) -> float:
    """Seconds for which a host that is lost ``now`` is left alone, after all its ``losses``, this one included."""
    recent = sum(moment > now - LOSSES_WITHIN_S for moment in losses)
    return LOSSES_WITHIN_S if recent >= MOST_LOSSES else TRY_AGAIN_S * 2 ** max(0, recent - 1)


def places_of(name: str) -> tuple[str, str]:
    """The host's address in numbers, and its agent's. Raises FieldError for what names none, ConfigError if unknown."""
    host, separator, port = name.rpartition(":")
    if not separator or (name.count(":") > 1 and not host.endswith("]")):  # HOST alone, or an IPv6 address
        host, port = name, str(control.DEFAULT_PORT)
    if not host or not port.isdecimal():
        raise FieldError("hosts", f"names {name!r}; a host is HOST or HOST:PORT")
    bracketed = f"[{host}]" if ":" in host and not host.startswith("[") else host
    numbers = in_url(place_of(f"tcp://{bracketed}:{port}").where[0])
    return numbers, f"tcp://{numbers}:{port}"


def in_url(address: str) -> str:
    return f"[{address}]" if ":" in address else address
