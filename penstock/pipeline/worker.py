"""A stage's process: its loop, the messages about grammars, and its memory."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import socket
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from penstock.core import ConfigError
from penstock.emulation.stage import BackgroundCore, share_host
from penstock.messages import (
    MOST_DETAILS,
    UNDECODABLE,
    Batch,
    ConnectNeighbours,
    Failed,
    Features,
    ForeignFrame,
    ForgetGrammar,
    Frame,
    GrammarPrepared,
    Heartbeat,
    HeartbeatAck,
    LinkBroken,
    Loading,
    MalformedBatch,
    MalformedMessage,
    Message,
    PrepareGrammar,
    RankBytes,
    RanksMeet,
    Recall,
    Recalled,
    Rejoin,
    Started,
    Stop,
    cut,
    decode,
    digest_of,
    encode,
)
from penstock.pipeline.base import StagePlan, StageSpec
from penstock.pipeline.engine_end import compute_with, load_layers, make_core, make_driver
from penstock.pipeline.loss import EngineUnreached
from penstock.stage.driver import Core, Outgoing, UnexpectedMessage
from penstock.stage.grammar import GrammarMasks
from penstock.stage.grammar_process import GrammarProcess
from penstock.stage.linked import (
    Leader,
    LinkedExchange,
    Loaded,
    RankExchange,
    SharedExchange,
    StageRankLost,
    exchanges,
    follow,
    say_loaded,
)
from penstock.stage.visibility import FeaturesError, ProtocolError
from penstock.transport.addresses import sleep_until, slept_until
from penstock.transport.inbox import Inbox
from penstock.transport.outbox import Outbox, Sockets

# ---------------------------------------------------------------------------------------------------------------- ranks
# The processes of a tensor parallel stage.
#
# The stage's own leads. On its host it forks the others before it loads anything. Over several hosts each rank is a
# process that the engine has started, the others once the first one listens for them:
#
#     engine   starts rank 0                starts the others there
#     rank 0      '--> listens, RanksMeet --'   loads               hears them, says where each is | joins the pipeline
#     others                                    '--> load, Loaded --'                              | follow

PR_SET_PDEATHSIG: Final = 1
"""The option of Linux's prctl that names the signal which a process gets when its parent ends."""
CHARACTERS: Final = 400
"""Upper limit of a rank's error text in the stage's own report, in characters. Its beginning says what is wrong."""


class RankLoadError(ConfigError):
    """A rank of a stage could not load its share; the text is its own."""


@contextlib.contextmanager
def led(plan: StagePlan) -> Iterator[Leader | None]:
    """Start the other ranks of a stage on one host, and end them with the block. None for any other stage.

    They are forked from this process while it has one thread that matters and nothing loaded, and end with it.
    """
    if plan.ranks == 1 or plan.places:
        yield None
        return
    ends, parent = exchanges(plan.ranks), os.getpid()
    children = []
    for rank in range(1, plan.ranks):
        pid = os.fork()
        if pid == 0:
            become_rank(plan, rank, ends, parent)
        children.append(pid)
    # A socket reads as closed only once every copy of its other end is closed: those that belong to the children must
    # not stay open here.
    for end in ends[1:]:
        end.close()
    try:
        yield Leader(ends[0])
    finally:
        ends[0].close()
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


@contextlib.contextmanager
def linked(spec: StageSpec, sockets: Sockets) -> Iterator[LinkedExchange | None]:
    """The end of a rank's connections to the others on several hosts. None for any other stage."""
    if spec.link is None:
        yield None
        return
    with sockets.inbox(spec.bind) as inbox:
        yield LinkedExchange(spec.link.rank, spec.plan.ranks, spec.link.secret, inbox, sockets)


def follow_elsewhere(spec: StageSpec, exchange: LinkedExchange) -> None:
    """Run as a rank behind the first, which listens for this one, until that one ends."""
    assert spec.link is not None
    assert spec.link.leader is not None
    exchange.connect({0: spec.link.leader})
    with contextlib.suppress(StageRankLost):
        serve_rank(spec.plan, spec.link.rank, exchange)


def become_rank(plan: StagePlan, rank: int, ends: list[SharedExchange], parent: int) -> None:
    """Run as a rank's process from its beginning. It never returns."""
    code = 1
    try:
        end_with_parent(parent)
        # For the same reason as in ``led``: the end of another rank shows only if this process holds no copy of it.
        for other, end in enumerate(ends):
            if other != rank:
                end.close()
        serve_rank(plan, rank, ends[rank])
    except StageRankLost:  # the stage has ended, and this rank with it
        code = 0
    except BaseException as error:
        if os.environ.get("PENSTOCK_DEBUG"):
            sys.excepthook(type(error), error, error.__traceback__)
    finally:
        os._exit(code)


def serve_rank(plan: StagePlan, rank: int, exchange: RankExchange) -> None:
    """Load a rank's share, and follow the first one. Raises StageRankLost once that has ended."""
    compute_with(threads_of(plan, rank))
    try:
        layers = load_layers(plan, rank=rank)
    except Exception as error:
        say_loaded(exchange, Loaded(problem=f"{type(error).__name__}: {error}"[:CHARACTERS]))
        raise
    layers.ranks.exchange = exchange
    say_loaded(exchange, Loaded(weight_bytes=layers.weight_bytes, kv_bytes=layers.kv_bytes))
    follow(exchange, layers, plan.capacity, plan.vocab_size)


def join_ranks(leader: Leader, layers: Any) -> list[RankBytes]:
    """Join loaded ``layers`` with the other ranks'. Returns the bytes that each rank holds, the first one's first.

    Raises RankLoadError where one could not load, and StageRankLost.
    """
    told = leader.loaded()
    if problem := next((one.problem for one in told if one.problem), ""):
        raise RankLoadError(problem)
    layers.ranks.exchange = leader.exchange
    return [RankBytes(weights=one.weight_bytes, kv=one.kv_bytes) for one in (layers, *told)]


def threads_of(plan: StagePlan, rank: int) -> int:
    """A rank's threads: those of its place, or a part of its stage's, as many as the others or one more."""
    if plan.places:
        return plan.places[rank].threads
    # Differences of two multiples, each rounded down: they add up to ``plan.threads`` and differ by one at most.
    return max(1, plan.threads * (rank + 1) // plan.ranks - plan.threads * rank // plan.ranks)


def end_with_parent(parent: int) -> None:
    """Have the system kill this process when the stage's own ends, where it can: on Linux.

    Elsewhere the process ends when it next hears of the stage, that its sockets are closed.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # The parent may have ended between the fork and the call above, which then never brings the signal.
    if os.getppid() != parent:
        os._exit(0)


# ------------------------------------------------------------------------------------------------------------- grammars
# The engine's messages about grammars, and a stage's reports: grammars are compiled beside the stage's loop.


class GrammarDesk:
    """Handles the engine's messages about grammars, and reports each grammar that has been compiled.

    The compiling thread wakes the stage's inbox for that, since only the loop may send.
    """

    def __init__(self, grammars: GrammarMasks, inbox: Inbox, tell_engine: Callable[[Message], None]) -> None:
        self._grammars = grammars
        self._inbox = inbox
        self._tell_engine = tell_engine
        self._done: deque[int] = deque()
        """Requests whose grammars are compiled: filled by the thread, emptied by the loop."""
        self._woken, self._waker = socket.socketpair()
        for end in (self._woken, self._waker):
            end.setblocking(False)
        inbox.watch(self._woken.fileno(), self._report)

    def on_message(self, message: Message) -> bool:
        """Take in a message. Returns whether it was about a grammar."""
        if isinstance(message, PrepareGrammar):
            number = message.request
            self._grammars.prepare(number, message.grammar, lambda: self._wake(number))
        elif isinstance(message, ForgetGrammar):
            self._grammars.forget(message.request)
        else:
            return False
        return True

    def _wake(self, request: int) -> None:
        self._done.append(request)
        with contextlib.suppress(OSError):  # full: already awake; closed: nobody is to be told any more
            self._waker.send(b"!")

    def close(self) -> None:
        """Report no further grammars."""
        self._inbox.unwatch(self._woken.fileno())
        self._woken.close()
        self._waker.close()

    def _report(self) -> None:
        self._woken.recv(4096)
        while self._done:
            self._tell_engine(GrammarPrepared(request=self._done.popleft()))


# --------------------------------------------------------------------------------------------------------------- memory
# Returning memory to the system as soon as loading frees it.
#
# glibc keeps freed memory for later. It adapts to keep blocks of up to 32 MiB, and a model that is dequantised and
# packed tensor by tensor frees so many of them that a stage would hold nearly twice its weights.

M_TRIM_THRESHOLD: Final = -1
"""The parameter of glibc's mallopt (malloc.h) for the free bytes at the heap's end above which they are returned."""
M_MMAP_THRESHOLD: Final = -3
"""The parameter of glibc's mallopt (malloc.h) for the size in bytes from which an allocation is mapped on its own."""
LARGE: Final = 1 << 18
"""Size in bytes from which an allocation is mapped from the system on its own while a stage loads: any large matrix."""
USUAL: Final = 32 << 20
"""The same size once a stage has loaded, in bytes: the highest that glibc itself chooses. Activations then stay with
the process, without page faults."""


@contextlib.contextmanager
def returned_at_once() -> Iterator[None]:
    """Within the block, freed large blocks of memory return to the system at once. Does nothing without glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        yield
        return
    mallopt(M_MMAP_THRESHOLD, LARGE)
    try:
        yield
    finally:
        mallopt(M_MMAP_THRESHOLD, USUAL)
        # mallopt has turned off glibc's own adaptation, which would set the trim threshold to twice the other.
        mallopt(M_TRIM_THRESHOLD, 2 * USUAL)


# --------------------------------------------------------------------------------------------------------------- worker
# A stage as a process: loads its layers, then turns messages from its inbox into messages to its neighbours.

log = logging.getLogger(__name__)

HEARTBEAT = 1.0
"""Seconds between a stage's heartbeats: several fit into the shortest ``stage_timeout``, 5 s."""
LOOK_AHEAD = 5e-4
"""Seconds before a due moment at which a stage takes in messages, so that only the due work is left for the moment."""
REMEMBERED = 8
"""Number of batches that a stage remembers beside those that can be in flight, of which each stage has two: one that it
computes and one that waits."""
FLUSH_S = 1.0
"""Seconds that a failed stage waits for its report to reach the engine. It is one message, and an engine that does not
read it is gone."""


Frames = tuple[bytes] | tuple[bytes, memoryview]


def run(spec: StageSpec) -> None:
    """Serve until told to stop: one session, or several in turn if stages beside this one are lost.

    Any error is reported to the engine before the process ends with it.
    """
    with (
        led(spec.plan) as leader,  # forks, and therefore comes first
        Sockets(spec.security, spec.private_network) as sockets,
        linked(spec, sockets) as exchange,
        sockets.inbox(spec.bind) as inbox,
    ):
        if exchange is not None and exchange.rank:
            follow_elsewhere(spec, exchange)
            return
        if exchange is not None:
            leader = Leader(exchange)
        layers: Any = None
        following: StageSpec | None = spec
        while following is not None:
            layers, following = serve_session(from_inside(following), sockets, inbox, layers, leader)


def serve_session(
    spec: StageSpec, sockets: Sockets, inbox: Inbox, layers: Any, leader: Leader | None
) -> tuple[Any, StageSpec | None]:
    """Serve until told to leave the session. ``layers`` come from the session before; None in the first one.

    Returns the layers, and the specification to go on with, None to stop.
    """
    # Before the engine hears of this stage: neighbours connect as soon as they know its address.
    inbox.admit(spec.session)
    engine = sockets.connect(spec.engine, spec.session)
    try:
        worker = Worker(spec, sockets, inbox, engine, layers, leader)
        following = worker.serve()
    except Exception as error:
        details = traceback.format_exc()
        failed = Failed(
            stage=spec.index,
            cause=cut(f"{type(error).__name__}: {error}"),
            details=details[-MOST_DETAILS:],
            unusable=unusable(error),
        )
        engine.send(encode(failed, spec.session))
        sockets.close(FLUSH_S)
        raise
    worker.leave()
    return worker.layers, following


class Worker:
    """One stage, and the sockets over which it receives and sends.

    Loads its layers, or takes over ``layers`` from another session and clears their state.
    """

    def __init__(
        self,
        spec: StageSpec,
        sockets: Sockets,
        inbox: Inbox,
        engine: Outbox,
        layers: Any,
        leader: Leader | None = None,
    ) -> None:
        self._spec = spec
        self._leader = leader
        self._inbox = inbox
        self._sockets = sockets
        self._outboxes: dict[str, Outbox] = {"engine": engine}
        """Destination -> outbox: "engine", "upstream", "downstream" and "drafter", as far as they are known."""
        self._unreached: set[str] = set()
        """Destinations that were reported to the engine as out of reach."""
        self._packed: tuple[Outgoing, Frames] | None = None
        """The message that leaves next, already encoded."""
        self._apart = spec.plan.emulation is not None and spec.plan.emulation.apart
        self._remembered: deque[Batch] = deque(maxlen=REMEMBERED + 2 * spec.stages)
        """The latest batches as they were received."""
        self._wired = self._stopped = self._acknowledged = False
        """``_acknowledged``: the engine has answered the latest heartbeat, or there was none yet."""
        self._following: StageSpec | None = None
        compute_with(threads_of(spec.plan, 0))
        if layers is None:
            if leader is not None and leader.exchange.address:
                self._tell_engine(RanksMeet(stage=spec.index, address=leader.exchange.address))
            with returned_at_once():
                layers = load_layers(spec.plan, self._tell_reading)
            layers.grammars = GrammarProcess(*layers.grammars.over)
            layers.rank_bytes = [] if leader is None else join_ranks(leader, layers)
        else:
            # From another session: its rows and features mean nothing to the requests of this one.
            layers.forget()
        self.layers = layers
        if leader is not None:
            leader.begin()
            for descriptor in leader.exchange.descriptors:
                inbox.watch(descriptor, leader.check)
        # Read once: asking a checkpoint's configuration takes as long as a message.
        self._width = layers.hidden_size
        self._entering, self._leaving = layers.entering_width, layers.leaving_width
        self._core = self._framed(make_core(spec.plan, spec.index, spec.stages, layers, leader))
        self._driver = make_driver(spec.plan, spec.index, self._core, time.monotonic)
        if spec.plan.tap is not None:
            self._outboxes["drafter"] = sockets.connect(spec.plan.tap.address, spec.plan.tap.session)
        self._grammars = GrammarDesk(layers.grammars, inbox, self._tell_engine)
        started = Started(
            stage=spec.index,
            address=inbox.address,
            kv_bytes=layers.kv_bytes + sum(one.kv for one in layers.rank_bytes[1:]),
            weight_bytes=layers.weight_bytes + sum(one.weights for one in layers.rank_bytes[1:]),
            exact=layers.exact,
            ranks=layers.rank_bytes,
        )
        self._tell_engine(started)
        self._beat_at = time.monotonic() + HEARTBEAT

    def _framed(self, core: Core) -> Core:
        from penstock.stage.tensors import FramedCore

        plan = self._spec.plan
        framed = FramedCore(core, plan.dtype, plan.device)
        return framed if plan.emulation is None else share_host(framed, plan.emulation)

    def _tell_reading(self, read: int, total: int) -> None:
        self._look_at_links()
        self._tell_engine(Loading(stage=self._spec.index, read=read, total=total))

    def _tell_engine(self, message: Message) -> None:
        self._outboxes["engine"].send(encode(message, self._spec.session))

    def serve(self) -> StageSpec | None:
        """Serve until told to leave the session. Returns the specification for the next one, or None."""
        while not self._stopped:
            self._wait()
            # A computed batch leaves first: messages that came meanwhile cannot change it.
            if self._wired and (leaving := self._driver.leave()) is not None:
                self._send(leaving)
            self._look()
            # A neighbour's first batch may overtake the engine's ConnectNeighbours: it waits in the driver.
            for outgoing in self._driver.step() if self._wired and not self._stopped else ():
                self._send(outgoing)
            self._beat()
        return self._following

    def leave(self) -> None:
        """Receive nothing more of the session, and send nothing."""
        self._inbox.dismiss(self._spec.session)
        for outbox in self._outboxes.values():
            self._sockets.disconnect(outbox)
        self._grammars.close()
        if self._leader is not None:
            for descriptor in self._leader.exchange.descriptors:
                self._inbox.unwatch(descriptor)
        if isinstance(self._core, BackgroundCore):
            self._core.close()

    def _wait(self) -> None:
        """Wait until something is due, or else for a message.

        Only on a shared device can a message make it due earlier.

        Also ends for the next heartbeat, which takes microseconds: due work stays due at its moment.
        """
        due = self._driver.due if self._wired else None
        until = self._beat_at if due is None else min(due, self._beat_at)
        if due is None or self._driver.device.shared:
            self._inbox.wait(until)
            return
        # Encoded while there is time, so that at its moment the message only has to be sent.
        leaving, packed = self._driver.leaving, self._packed
        # With clocks apart a message says when it leaves, so that it is encoded only then.
        if leaving is not None and not self._apart and (packed is None or packed[0] is not leaving):
            self._packed = leaving, self._frames(leaving)
        # Just before the moment, messages are taken in once more: a cancel among them may still spare rows.
        if slept_until(until - LOOK_AHEAD):
            self._look()
        sleep_until(until)

    def _look(self) -> None:
        """Take in the messages that have arrived."""
        for frames in self._inbox.take():
            if not self._stopped:  # later messages belong to the session that has been left
                self._receive(frames)
        if self._inbox.broken() and not self._stopped:
            self._tell_engine(LinkBroken(stage=self._spec.index))

    def _look_at_links(self) -> None:
        """Report destinations that are out of reach. Raises EngineUnreached if it is the engine."""
        for to in self._outboxes.keys() - self._unreached:
            if cause := self._outboxes[to].unreached:
                if to == "engine":
                    raise EngineUnreached(cause)
                self._unreached.add(to)
                self._tell_engine(LinkBroken(stage=self._spec.index, to=to, cause=cut(cause)))

    def _beat(self) -> None:
        """Send the engine a heartbeat when it is time, unless it has not answered the last one."""
        if time.monotonic() < self._beat_at:
            return
        # In the loop that computes, not on a thread of its own: a stage that is stuck in a batch has to fall silent.
        self._look_at_links()
        if self._leader is not None:
            self._leader.check()
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
        arrives = delivery.arrives_by(time.monotonic())
        if isinstance(message, Batch):
            # As it was received: the engine compares what each stage got with what it sent (``Recall``).
            self._remembered.append(message)
            self._driver.on_message(message, self._hidden_states(message, frames), arrives)
        elif isinstance(message, Stop):
            self._stopped = True
        elif isinstance(message, Rejoin):
            self._following, self._stopped = following(message), True
        elif isinstance(message, ConnectNeighbours):
            self._outboxes["upstream"] = self._sockets.connect(message.upstream, self._spec.session)
            self._outboxes["downstream"] = self._sockets.connect(message.downstream, self._spec.session)
            # Heartbeats begin only now: the engine acknowledges those of joined stages alone.
            self._wired = self._acknowledged = True
        elif isinstance(message, HeartbeatAck):
            self._acknowledged = True
        elif isinstance(message, Recall):
            self._tell_engine(self._recalled(message.stream))
        elif isinstance(message, Features):
            self._driver.on_message(message, frames[1] if message.nodes else None, arrives)
        elif not self._grammars.on_message(message):
            self._driver.on_message(message, None, arrives)

    def _recalled(self, stream: int) -> Recalled:
        found = next((batch for batch in self._remembered if batch.stream == stream), None)
        digest = "" if found is None else digest_of(found)
        return Recalled(stage=self._spec.index, digest=digest)

    def _hidden_states(self, batch: Batch, frames: list[Frame]) -> Frame | None:
        """The hidden states of a batch, a line per surviving row; None from the engine, which sends only tokens."""
        if self._spec.index == 0 or not batch.alive:
            return None
        if (batch.dtype, batch.width) != (self._spec.plan.dtype, self._entering):
            raise MalformedBatch(f"batch {batch.stream} brings {batch.dtype or 'no'} states of width {batch.width}")
        return frames[1]

    def _send(self, outgoing: Outgoing) -> None:
        if self._packed is not None and self._packed[0] is outgoing:
            frames, self._packed = self._packed[1], None
        else:
            frames = self._frames(outgoing)
        self._outboxes[outgoing.to].send(*frames)

    def _frames(self, outgoing: Outgoing) -> Frames:
        message, plan, session = outgoing.message, self._spec.plan, self._spec.session
        left = time.monotonic() if self._apart else None
        if outgoing.to == "drafter":
            assert plan.tap is not None
            session = plan.tap.session
        if outgoing.tensor is None or not isinstance(message, Batch | Features):
            return (encode(message, session, outgoing.arrives, left),)
        message.width = self._width * len(message.layers) if isinstance(message, Features) else self._leaving
        message.dtype = plan.dtype
        return encode(message, session, outgoing.arrives, left), outgoing.tensor


def unusable(error: Exception) -> str:
    """Whether an error comes of a batch, of another message, of another rank or of none, in the words of ``Failed``."""
    if isinstance(error, ProtocolError | MalformedBatch):
        return "batch"
    if isinstance(error, StageRankLost):
        return "rank"
    return "message" if isinstance(error, FeaturesError | MalformedMessage | UnexpectedMessage) else ""


def from_inside(spec: StageSpec) -> StageSpec:
    """The specification as its own process has it, which sees no GPU but its own: that is number 0."""
    kind, _, number = spec.plan.device.partition(":")
    return replace(spec, plan=replace(spec.plan, device=f"{kind}:0")) if number else spec


def following(message: Rejoin) -> StageSpec:
    """The specification in a Rejoin. Raises MalformedMessage if it does not decode."""
    try:
        return msgspec.json.decode(message.spec, type=StageSpec)
    except UNDECODABLE as error:
        raise MalformedMessage(f"what is to be rejoined does not decode: {error}") from error
