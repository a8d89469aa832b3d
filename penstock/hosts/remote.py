"""Another host as its head sees it: its lease, its stages, its part of a checkpoint, and its clock's offset."""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Collection, Sequence
from typing import Final, NamedTuple

from penstock.core import NO_HOST, ConfigError
from penstock.hosts import messages
from penstock.hosts.facts import HostFacts
from penstock.hosts.fetching import Courier, Offer, Question
from penstock.hosts.placement import host_and_port
from penstock.hosts.weights import PIECE, Held
from penstock.messages import MalformedMessage
from penstock.pipeline.base import StageSpec
from penstock.pipeline.forking import exit_report
from penstock.transport.addresses import in_url, place_of
from penstock.transport.outbox import Outbox, Sockets

# -------------------------------------------------------------------------------------------------------------- offsets
# Estimates how far two hosts' clocks are apart, as NTP does, from messages that go there and back.

KEPT: Final = 64
"""Latest round trips that count; the quickest gives the offset. Clocks drift by only microseconds meanwhile."""


class ClockOffset(NamedTuple):
    """Seconds to add to a moment of this host's clock for the other's, and the largest error of that, in seconds."""

    seconds: float
    error: float


class Offsets:
    """Offsets of another host's monotonic clock, by the latest round trips."""

    def __init__(self) -> None:
        self._round_trips: deque[ClockOffset] = deque(maxlen=KEPT)

    def add(self, sent: float, received: float, answered: float, back: float) -> None:
        """Add a round trip: ``sent`` and ``back`` by this host's clock, ``received`` and ``answered`` by the other's.

        All are in seconds.
        """
        # Either way takes between none and all of the travelling time, so half of it bounds the error.
        travelled = max(0.0, (back - sent) - (answered - received))
        self._round_trips.append(ClockOffset(((received - sent) + (answered - back)) / 2, travelled / 2))

    @property
    def best(self) -> ClockOffset | None:
        """The offset with the smallest error; None before the first round trip."""
        return min(self._round_trips, key=lambda one: one.error, default=None)


# --------------------------------------------------------------------------------------------------------------- remote
# Another host as its head sees it: the stages that its agent starts, their ends, and whether it is still there.

log = logging.getLogger(__name__)

ANSWER_S: Final = 10.0
"""Seconds within which an agent has to answer. It counts until a host has said what it has, and while it fetches, for
which ``messages.LEASE`` would be too short."""
TRY_AGAIN_S: Final = 3.0
"""Seconds after which a lost host is asked again; each further recent loss doubles them. By then an agent that was cut
off has ended its lease (``messages.LEASE``, 2.25 s)."""
MOST_LOSSES: Final = 3
"""Recent losses from which on a host is left alone for ``LOSSES_WITHIN_S``. One or two may be chance."""
STALLED: Final = f"it has not come nearer to holding its layers for {ANSWER_S:.0f} s"
RETRY_S: Final = 20.0
"""Seconds after which a host that failed to get its layers is asked for them again. Shorter times repeat a fetch that
fails more often."""
BEATS_KEPT: Final = 64
"""Newest beats whose answers still count for the clock's offset. They are 48 s of beats."""
LOSSES_WITHIN_S: Final = 600.0
"""Seconds for which a loss counts as recent, and for which a host that is lost too often is left alone. A host that
fails again and again would else be given stages that are soon lost."""


class RemoteHost:
    """A launcher (``pipeline/base.py``) of stages on the host named ``name``, HOST or HOST:PORT.

    ``attach`` begins a lease, ``lose`` ends it with all processes that were started under it. ``facts`` are there once
    the agent has answered. A host that comes back has new ones, and is asked again for the layers that it is to hold.
    """

    def __init__(self, name: str, sockets: Sockets) -> None:
        self.name = name
        self.facts: HostFacts | None = None
        self.offsets = Offsets()
        self.lease = ""
        """The secret of the latest lease."""
        self.attached = False
        """Whether the latest lease goes on: the agent has answered, or may yet."""
        self.cause = ""
        """The reason why the last lease that has ended did."""
        self.cut_off = ""
        """The reason why the host is to be lost, though it answers; empty for none. May be set by any thread."""
        self.came_once = False
        """Whether the host has ever answered."""
        self._sockets = sockets
        self._host, self.address = name_and_address(name)
        """``_host``: the host's address. ``address``: its agent's, tcp://HOST:PORT. Both are in numbers."""
        self._outbox: Outbox | None = None
        self._bulk: Outbox | None = None
        """A connection of its own for large messages, so that no beat waits behind them."""
        self._listeners: dict[str, int] = {}
        """The pipe into which to report the end of each process, by the process's name."""
        self._running: set[str] = set()
        """Names of the processes that have not ended."""
        self._silent = 0.0
        self._beats: deque[float] = deque(maxlen=BEATS_KEPT)
        """Times at which the beats were sent that may still be answered."""
        self._lost_at = 0.0
        self._losses: deque[float] = deque(maxlen=MOST_LOSSES)
        """Times at which the host was lost after it had been there."""
        self._lock = threading.RLock()
        """Guards the state that both the engine's thread and the fleet's thread change."""
        self._searches: dict[str, Search] = {}
        """The search for what the host is to hold of each checkpoint, by the checkpoint's path here."""
        self._questions = 0

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
            if not self.attached:  # lost since the stage was placed here: it counts as ended
                self._report(spec.process, self.cause)
                return
            if self.searching:  # lost since, and back: what it holds is proved under each lease anew
                self._report(spec.process, f"host {self.name} was lost, is back, and has yet to find its layers")
                return
            self._tell(messages.StartStage(spec=spec))

    def kill(self, process: str) -> None:
        self._tell(messages.KillStage(process=process))

    def ended(self, process: str) -> bool:
        with self._lock:
            return process not in self._running

    # --------------------------------------------------------------------------------------------------- its checkpoint

    def ask(self, offer: Offer, layers: Collection[Held]) -> None:
        """Have the host hold these layers, unless it holds them, or is looking for them, already.

        Raises OSError, and ConfigError for a damaged file.
        """
        with self._lock:
            before = self._searches.get(offer.path)
            if before is not None and before.serves(offer, layers):
                return
            offer.prepare(layers)
            if before is not None:
                before.forget()
            search = self._searches[offer.path] = Search(offer, tuple(layers))
            if self.facts is not None:
                self._begin(search)

    def holds(self, offer: Offer, layers: Collection[Held]) -> bool:
        """Whether stages of these layers can load the checkpoint on the host."""
        with self._lock:
            search = self._searches.get(offer.path)
            return search is not None and search.problem == "" and search.serves(offer, layers)

    @property
    def searching(self) -> bool:
        """Whether the host has yet to say whether it holds the layers that it was asked for."""
        with self._lock:
            return any(search.problem is None for search in self._searches.values())

    @property
    def problem(self) -> str:
        """The reason why a checkpoint cannot be loaded on the host; empty if each can, or it is not known."""
        with self._lock:
            return next((search.problem for search in self._searches.values() if search.problem), "")

    @property
    def progress(self) -> tuple[int, int] | None:
        """Bytes of its layers that the host holds, and needs in all; None while it is not being sent any."""
        with self._lock:
            sending = [one for one in self._searches.values() if one.fetched and one.problem is None and one.question]
            needed = sum(one.question.needed_bytes for one in sending if one.question is not None)
            return (sum(one.held for one in sending), needed) if sending else None

    def _begin(self, search: Search) -> None:
        """Ask for what the host is to hold, as a new question, over the connection for large messages."""
        self._questions += 1
        search.begin(search.offer.question(search.layers, self._questions))
        assert search.question is not None
        if self._bulk is None:
            self._bulk = self._sockets.connect(self.address, messages.DOOR)
        search.courier = Courier(search.offer, search.question, self._bulk, self.lease, self._cut_off_by_courier)
        self._bulk.send(messages.encode(search.question.asked, self.lease), search.question.digests)

    def _cut_off_by_courier(self, cause: str) -> None:
        self.cut_off = f"host {self.name} was lost: its layers could not be sent: {cause}"

    # ---------------------------------------------------------------------------------------- by the fleet's thread

    def attach(self, head: str) -> str:
        """Ask the agent to serve ``head``, the address of an inbox. Returns the new lease's secret."""
        with self._lock:
            self.facts, self._silent, self.cut_off = None, 0.0, ""
            self._beats.clear()
            self._outbox = self._sockets.connect(self.address, messages.DOOR)
            self.lease, self.attached = secrets.token_hex(16), True
            self._tell(messages.Attach(head=head, host=self._host))
            return self.lease

    @property
    def fault(self) -> str:
        """The reason why there is no connection to the agent; empty if there is one, or it is not known yet."""
        return self._outbox.fault if self._outbox is not None else ""

    @property
    def wants_back(self) -> bool:
        """Whether a host that was lost is to be asked again now."""
        return not self.attached and time.monotonic() >= self._lost_at + pause_after(self._losses, self._lost_at)

    @property
    def may_be_asked(self) -> bool:
        """Whether a host that was lost could be asked again, should there be no other one."""
        return not self.attached and time.monotonic() >= self._lost_at + TRY_AGAIN_S

    def beat(self) -> None:
        """Send a beat, and remember when, so that its answer can be told from others."""
        now = time.monotonic()
        self._beats.append(now)
        self._tell(messages.Beat(sent=now))

    def take(self, message: messages.Message) -> None:
        """Take in an agent's message under the lease. Raises MalformedMessage for one that is not for a head."""
        self._silent = 0.0
        with self._lock:
            if isinstance(message, messages.Attached):
                self._take_facts(message.facts)
            elif isinstance(message, messages.BeatAnswer):
                self._take_beat(message)
            elif isinstance(message, messages.CheckpointFound | messages.Progress):
                for search in self._searches.values():  # each takes what answers its own question
                    search.take(message)
            elif isinstance(message, messages.WantPiece):
                for search in self._searches.values():
                    if search.courier is not None:
                        search.courier.want(message)
            elif isinstance(message, messages.StageEnded):
                self._report(message.process, message.cause)
            elif isinstance(message, messages.LeaseEnded):
                self.lose(f"host {self.name} was lost: {message.cause}")
            else:
                raise MalformedMessage(f"{type(message).__name__} is not for a head")

    def _take_facts(self, facts: HostFacts) -> None:
        """Note that the agent has answered: from now on the host counts as alive, and is asked for its layers."""
        if self.facts is not None:
            raise MalformedMessage("it has attached already")
        self.facts, self.came_once = facts, True
        self.beat()
        for search in self._searches.values():
            self._begin(search)

    def _take_beat(self, answer: messages.BeatAnswer) -> None:
        """Learn the clock offset from an answer, unless it answers no recent beat, or one for the second time."""
        if answer.sent in self._beats:
            self._beats.remove(answer.sent)
            self.offsets.add(answer.sent, answer.received, answer.answered, time.monotonic())

    def listened(self, seconds: float) -> None:
        """Note that the head has listened for ``seconds`` more: the host may be lost, or asked again for its layers."""
        self._silent += seconds
        if self.attached and self.cut_off:
            self.leave()
            self.lose(self.cut_off)
        elif self.attached and self._silent > (limit := ANSWER_S if self.facts is None else messages.LEASE):
            self.lose(f"host {self.name} was lost: it has said nothing for {limit:.1f} s")
        elif self.alive and self._stalls(seconds):
            self.leave()
            self.lose(f"host {self.name} was lost: {STALLED}")
        elif self.alive:
            self._ask_again(seconds)

    def _ask_again(self, seconds: float) -> None:
        """Ask a host again that could not get hold of its layers: its disk may have room now, or its link be better."""
        with self._lock:
            for search in self._searches.values():
                if search.is_worth_another_try(seconds):
                    log.info("host %s is asked again for its layers: %s", self.name, search.problem)
                    self._begin(search)

    def _stalls(self, seconds: float) -> bool:
        """Whether nothing has moved for too long: searches share one connection, so all of them have to wait."""
        with self._lock:
            waiting = 0 if self._bulk is None else self._bulk.backlog
            stalled = [one.stalls(seconds, waiting) for one in self._searches.values() if one.problem is None]
            return bool(stalled) and all(stalled)

    def lose(self, cause: str) -> None:
        """End the lease because the host is lost, and report the ends of all its processes."""
        if self.facts is not None:
            self._note_loss(cause)
        with self._lock:
            # The cause first: other threads read it as soon as they see that the host is not attached.
            self.cause, self._lost_at = cause, time.monotonic()
            self.attached, self.facts = False, None
            for search in self._searches.values():
                search.forget()
            for process in list(self._running):  # a copy: reporting an end removes the process
                self._report(process, cause)
        self._close_connections()

    def refuse(self, cause: str) -> None:
        """End the lease because the agent that has answered cannot be used; the host never counts as alive."""
        self.leave()
        self._note_loss(cause)
        # ``lose`` notes only the loss of a host that was there (``facts``), which this one never was.
        self.lose(cause)

    def start_probe(self, session: str, head: str) -> None:
        """Have a probe started on the host that answers to ``head``, an inbox, by the host's name."""
        self._tell(messages.StartProbe(name=self.name, session=session, head=head))

    def leave(self) -> None:
        """Tell the agent that the head leaves."""
        self._tell(messages.Detach())

    def end(self) -> None:
        """Stop sending layers."""
        with self._lock:
            for search in self._searches.values():
                search.forget()

    def _note_loss(self, cause: str) -> None:
        self._losses.append(time.monotonic())
        seconds = pause_after(self._losses, self._losses[-1])
        log.warning("%s; it is asked again in %.0f s", cause, seconds)

    def _close_connections(self) -> None:
        """Close the connections to the agent. Outside of the lock, since that may wait."""
        with self._lock:
            closing = [one for one in (self._outbox, self._bulk) if one is not None]
            self._outbox = self._bulk = None
        for outbox in closing:
            self._sockets.disconnect(outbox)

    def _tell(self, message: messages.Message) -> None:
        """Send the agent a message under the lease, unless the connection is closed."""
        if (outbox := self._outbox) is not None:
            outbox.send(messages.encode(message, self.lease))

    def _report(self, process: str, cause: str) -> None:
        """Report that a process has ended, once."""
        if process in self._running:
            self._running.discard(process)
            # The same bytes as a local fork server writes: the executor reads the ends of all processes alike.
            os.write(self._listeners[process], exit_report(process, cause))


class Search:
    """A search for the layers of an offer on one host: one question under each lease, until one is answered."""

    def __init__(self, offer: Offer, layers: tuple[Held, ...]) -> None:
        self.offer = offer
        self.layers = layers
        self.question: Question | None = None
        self.courier: Courier | None = None
        self.problem: str | None = None
        """The host's answer: empty if it holds the layers, else why not. None while it has not answered."""
        self.fetched = False
        """Whether the host has to be sent some of the layers."""
        self.held = 0
        self._failed = 0.0
        """Seconds since the host said that it cannot get the layers."""
        self._idle = 0.0
        """Seconds without progress."""
        self._seen = 0, 0
        """The state at the last progress: pieces that the host held, and bytes that had yet to leave for it."""

    def serves(self, offer: Offer, layers: Collection[Held]) -> bool:
        """Whether this search covers these layers of this offer, and has not failed."""
        return self.offer is offer and not self.problem and set(layers) <= set(self.layers)

    def begin(self, question: Question) -> None:
        """Ask a new question; what was known of the answer is dropped."""
        self.forget()
        self.question = question

    def forget(self) -> None:
        """Drop question and answer, which belong to a lease that has ended."""
        if self.courier is not None:
            self.courier.stop()
        self.question = self.courier = self.problem = None
        self.fetched, self.held, self._failed, self._idle, self._seen = False, 0, 0.0, 0.0, (0, 0)

    def take(self, message: messages.CheckpointFound | messages.Progress) -> None:
        """Take in an answer, unless it is to an earlier question. Raises MalformedMessage for impossible progress."""
        if self.question is None or message.number != self.question.asked.number or self.problem is not None:
            return
        if isinstance(message, messages.CheckpointFound):
            self.problem = message.problem
            return
        if message.held > self.question.needed_bytes:
            raise MalformedMessage(f"it holds {message.held} bytes of {self.question.needed_bytes}")
        self.fetched, self.held = message.fetched, message.held

    def is_worth_another_try(self, seconds: float) -> bool:
        """Whether the host has failed for over ``RETRY_S`` seconds, the ``seconds`` that have just passed included."""
        self._failed = self._failed + seconds if self.problem else 0.0
        return self._failed > RETRY_S

    def stalls(self, seconds: float, waiting: int) -> bool:
        """Whether nothing has moved for too long, after ``seconds`` more, with ``waiting`` bytes yet to leave."""
        now = self.held // PIECE, waiting
        waits = self.question is not None and self.problem is None
        # Progress is another whole piece that the host holds, or another number of bytes that wait to leave for it.
        self._idle = self._idle + seconds if waits and now == self._seen else 0.0
        self._seen = now
        return self._idle > ANSWER_S


def pause_after(losses: Sequence[float], now: float) -> float:
    """Seconds for which a host lost at ``now`` is left alone; ``losses`` are the times of its losses, this one too."""
    recent = sum(moment > now - LOSSES_WITHIN_S for moment in losses)
    return LOSSES_WITHIN_S if recent >= MOST_LOSSES else TRY_AGAIN_S * 2 ** max(0, recent - 1)


def name_and_address(name: str, field: str = "hosts", *, least_port: int = 1) -> tuple[str, str]:
    """Addresses, in numbers, of a host and its agent, whose ``name`` is in the user's ``field``.

    ``least_port`` is that of ``host_and_port``. Raises FieldError for an invalid name, and ConfigError if nobody knows
    it.
    """
    host, port = host_and_port(name, field, least_port=least_port)
    port = port or str(messages.DEFAULT_PORT)
    bracketed = f"[{host}]" if ":" in host and not host.startswith("[") else host
    try:
        numbers = in_url(place_of(f"tcp://{bracketed}:{port}", look_up=True).where[0])
    except ConfigError as error:
        reason = getattr(error.__cause__, "strerror", None) or NO_HOST
        raise ConfigError(f"host {name} ({field}): {reason}") from error
    return numbers, f"tcp://{numbers}:{port}"
