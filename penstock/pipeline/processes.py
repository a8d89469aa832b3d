"""Stages as processes: on this host over Unix-domain sockets (ipc) or tcp, on other hosts over tcp."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import secrets
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from penstock.core import ConfigError, PipelineLost
from penstock.messages import (
    Batch,
    Cancel,
    ConnectNeighbours,
    Delivery,
    Failed,
    ForeignFrame,
    ForgetGrammar,
    Frame,
    Heartbeat,
    HeartbeatAck,
    LinkBroken,
    Loading,
    MalformedMessage,
    Message,
    PrepareGrammar,
    RanksMeet,
    Ready,
    Recall,
    Recalled,
    Rejoin,
    Result,
    Span,
    Started,
    Stop,
    belongs,
    decode,
    encode,
)
from penstock.pipeline import loss
from penstock.pipeline.base import Elsewhere, Launcher, StagePlan, StageSpec, TapSpec
from penstock.pipeline.engine_end import EngineEnd, entrance
from penstock.pipeline.forkserver import ForkServer, shared_fork_server
from penstock.pipeline.loss import ANY_STAGE, LEAST_PATIENCE, Listening, Loss, Owner, Patience, Silence, Source
from penstock.pipeline.stage_process import StageProcess, living, take, with_ranks
from penstock.stage.visibility import ProtocolError
from penstock.transport.addresses import IPC, LinkSecurity
from penstock.transport.inbox import Inbox
from penstock.transport.outbox import Outbox, Sockets

log = logging.getLogger(__name__)

START_TIMEOUT = 300.0
"""Seconds that a stage may take to start, counted anew at each ``PROGRESS``: a slow disk may need many times."""
PROGRESS = 0.001
"""Share (0 to 1) of its layers that a stage has to read for that. With less it would hardly ever be given up."""
CLOSE_TIMEOUT = 5.0
"""Seconds that stages may take to leave before they are killed; a fork server has ``forkserver.END_TIMEOUT``."""
EXIT_LOOK_EVERY = 0.05
"""Seconds between checks for ended processes that no fork server may report. Closing takes up to that longer."""


OnBroken = Callable[[], None]
"""A callback, called when a connection of the session has ended."""
OnLoading = Callable[[str, str, Loading | Started], None]
"""A callback, called with a host's name in plans, a pipeline's name, and a message from one of its stages there."""


class ProcessExecutor:
    """The engine's inbox, its clock and the fork server, which all pipelines of one engine share.

    ``transport`` is "ipc" or "tcp", the latter with TLS if there is ``security``. With ``elsewhere`` a plan may name
    another host; all then talk over tcp, and none at a loopback address. A frame of an unknown session is refused and
    counted. A stage is lost if it has been silent for ``stage_timeout`` seconds of listening (None: as ``Patience``
    says). ``on_loading`` is told which stages have read how much of their weights, and what each holds once it has
    started.
    """

    def __init__(
        self,
        transport: str = "ipc",
        stage_timeout: float | None = None,
        security: LinkSecurity | None = None,
        on_loading: OnLoading | None = None,
        elsewhere: Elsewhere | None = None,
    ) -> None:
        self.private_network = elsewhere is not None and elsewhere.private_network
        self.sockets = Sockets(security, self.private_network)
        self.server: ForkServer = shared_fork_server()
        self.transport = transport
        self.security = security
        self._elsewhere = elsewhere
        self.on_loading = on_loading
        self.refused = 0
        self._closed = False
        self._name = secrets.token_hex(4)
        self._reports, self._report_pipe = os.pipe()
        self._woken, self._waker = socket.socketpair()
        for end in (self._woken, self._waker):
            end.setblocking(False)
        self._told = False
        """Whether a wake or a report has been read since a wait last ended for one."""
        self.inbox = self._open_inbox()
        self._owners: dict[str, Owner] = {}
        self._processes: dict[str, StageProcess] = {}
        """Process name -> process, from its start until it is forgotten."""
        self._unused: list[StageProcess] = []
        """The processes among them that are in no pipeline."""
        self._on_broken: dict[str, OnBroken] = {}
        self._on_listened: dict[str, Callable[[float], bool]] = {}
        self.faults = loss.HostFaults(self.now, self.cut_off)
        self.stage_timeout = stage_timeout
        self._listening = Listening(self.now())

    def launcher(self, host: str) -> Launcher:
        """The launcher for a host, as a plan names it; empty is this one."""
        if not host:
            return self.server
        assert self._elsewhere is not None, f"a plan names host {host!r}, and this engine knows no other"
        return self._elsewhere.launchers[host]

    def cut_off(self, host: str, cause: str) -> None:
        """Declare another host lost, as a plan names it: this host reaches it, but others do not."""
        assert self._elsewhere is not None
        self._elsewhere.cut_off(host, cause)

    def _open_inbox(self) -> Inbox:
        inbox = self.sockets.inbox(self.bind_address("engine"))
        inbox.watch(self._reports, self._read_reports)
        inbox.watch(self._woken.fileno(), self._read_wakes)
        return inbox

    def _outlive_server(self) -> None:
        """Replace a fork server that has died. Its stages and the folder of the sockets are gone with it."""
        if self.server.alive:
            return
        self.server = shared_fork_server()
        # The inbox's socket was in that folder, so nobody could connect to it any more.
        if self.inbox.address.startswith(IPC):
            self.inbox.close()
            self.inbox = self._open_inbox()
            # A new inbox knows no session, and would refuse the connections of stages that are about to start.
            for session in self._owners:
                self.inbox.admit(session)

    def bind_address(self, who: str) -> str:
        if self._elsewhere is not None:
            return f"tcp://{self._elsewhere.reached_at}:*"
        if self.transport == "tcp":
            return "tcp://127.0.0.1:*"
        return f"{IPC}{self.server.folder}/{self._name}-{who}"

    def now(self) -> float:
        return time.monotonic()

    def wait(self, until: float | None) -> None:
        """Wait for messages or until the moment, and hand each message to the pipeline that it belongs to.

        A message that gives the engine nothing to do, such as a heartbeat, does not end the wait.
        """
        end = math.inf if until is None else until
        ended = False
        while not ended:
            # Cut into intervals, so that silent stages are noticed however long nothing else happens.
            ended = self._wait_once(min(end, self._listening.next_look)) or self.now() >= end
            if self.now() >= self._listening.next_look:
                seconds = self._listening.look(self.now())
                # Not ``any``: every pipeline has to count the seconds, whatever the first one answers.
                for on_listened in self._on_listened.values():
                    ended |= on_listened(seconds)

    def _wait_once(self, until: float) -> bool:
        """Wait once, and hand over the messages. Returns whether the engine may have something to do now."""
        self.inbox.wait(until)
        try:
            news = [self._deliver(frames) for frames in self.inbox.take()]
        except BaseException:  # an interrupt, which may have cost messages
            for owner in self._owners.values():
                interrupted = Failed(stage=-1, cause="the engine was interrupted while it took messages in")
                owner(Delivery(message=interrupted), [])
            raise
        broken = self.inbox.broken()
        for session in broken:
            self._on_broken[session]()
        told, self._told = self._told, False
        return told or bool(broken) or any(news)  # else: a heartbeat, a new connection, a part of a message, the moment

    def wake(self) -> None:
        """Make the current ``wait``, or else the next one, return at once. May be called from any thread."""
        with contextlib.suppress(OSError):  # full: already awake; closed: nobody waits any more
            self._waker.send(b"!")

    def _read_wakes(self) -> None:
        self._told = True
        self._woken.recv(4096)

    def _deliver(self, frames: Sequence[Frame]) -> bool:
        """Hand a message to its owner. Returns whether the engine now has something to do."""
        for session, owner in self._owners.items():
            if not belongs(frames, session):
                continue
            try:
                delivery = decode(frames, session)
            except ForeignFrame:  # too large: no stage of this engine sends that
                continue
            except MalformedMessage as error:
                delivery = Delivery(message=Failed(stage=ANY_STAGE, cause=str(error)))
            return loss.handed(owner, delivery, frames)
        self.refused += 1
        log.warning("refused a frame that belongs to no session of this engine")
        return False

    def _read_reports(self) -> None:
        """Read the fork server's reports. Each line is written at once, so the pipe never holds a part of one."""
        self._told = True
        for line in os.read(self._reports, 65536).splitlines():
            told = json.loads(line)
            if (process := self._processes.get(told["process"])) is not None:
                process.end(told["cause"])

    def register(self, session: str, owner: Owner, on_broken: OnBroken, on_listened: Callable[[float], bool]) -> None:
        """Route the session's messages to ``owner``, and call ``on_broken`` when a connection of it has ended.

        ``on_listened`` is called about once a second with the seconds that the engine has listened since, and returns
        whether the engine now has something to do.
        """
        self._owners[session] = owner
        self._on_listened[session] = on_listened
        self._on_broken[session] = on_broken
        self.inbox.admit(session)

    def unregister(self, session: str) -> None:
        self.inbox.dismiss(session)
        self._owners.pop(session, None)
        self._on_broken.pop(session, None)
        self._on_listened.pop(session, None)

    def process_for(self, plan: StagePlan) -> StageProcess:
        """An unused process that holds the plan's layers, or a new one, which has not been started yet."""
        found = take(self._unused, plan)
        if found is not None:
            return found
        process = StageProcess(plan, self.launcher(plan.host))
        process.ranks = [StageProcess(plan, self.launcher(place.host), reported=True) for place in plan.places[1:]]
        for one in with_ranks([process]):
            self._processes[one.name] = one
            # Before the start, so that no end can be missed.
            one.launcher.listen(one.name, self._report_pipe)
        return process

    def keep(self, processes: Sequence[StageProcess]) -> None:
        """Keep these processes for later pipelines; they are in none now."""
        for process in processes:
            # The end of an unused process is nobody's loss. ``take`` looks whether it still lives.
            process.watched(None)
        self._unused += processes

    def end_unused(self) -> None:
        unused, self._unused = self._unused, []
        self.end(unused)

    def end(self, processes: Sequence[StageProcess], seconds: float = 0.0) -> None:
        """End processes. Those that have not left after ``seconds`` are killed."""
        processes = with_ranks(processes)
        try:
            self._wait_until_gone(processes, seconds)
        finally:
            for process in processes:
                process.launcher.kill(process.name)
        self._wait_until_gone(processes, CLOSE_TIMEOUT)
        for process in processes:
            process.launcher.forget(process.name)
            del self._processes[process.name]

    def _wait_until_gone(self, processes: Sequence[StageProcess], seconds: float) -> None:
        """Wait until they are gone, reported by the fork server or not, for at most ``seconds``."""
        deadline = time.monotonic() + seconds
        while living(processes):
            now = time.monotonic()
            if now >= deadline:
                return
            self.wait(min(deadline, now + EXIT_LOOK_EVERY))

    def begin(self, plans: Sequence[StagePlan], name: str = "stage") -> ProcessPipeline:
        self._outlive_server()
        return ProcessPipeline(plans, self, name)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._unused.clear()
        self.end(list(self._processes.values()))  # the unused ones, and those of a start that was interrupted
        for session in list(self._owners):
            self.unregister(session)
        self.inbox.unwatch(self._reports)
        os.close(self._reports)
        os.close(self._report_pipe)
        self.inbox.unwatch(self._woken.fileno())
        self._woken.close()
        self._waker.close()
        self.inbox.close()
        self.sockets.close()


class ProcessPipeline:
    """One process per stage, joined to a pipeline: engine -> stage 0 -> ... -> stage N-1 -> engine.

    A process is new, or has left another pipeline and holds the layers that are needed. The session is always new, so
    that messages of an earlier one are refused. Raises PipelineLost from ``joined`` when a stage cannot start, and from
    ``poll`` when one is lost.
    """

    def __init__(self, plans: Sequence[StagePlan], executor: ProcessExecutor, name: str = "stage") -> None:
        self.stages = len(plans)
        self.name = name
        self.started: dict[int, Started] = {}
        self._plans = plans
        self._executor = executor
        self._apart = any(plan.emulation is not None and plan.emulation.apart for plan in plans)
        self._session = secrets.token_hex(16)
        self._processes: list[StageProcess] = []
        self._calls: list[Outbox] = []
        """Connections to processes that come from another session, to call them into this one."""
        self._loss = Loss()
        self._blame = loss.Blame([plan.host for plan in plans], self._who, executor.faults, self._lose_for_fault)
        self._inboxes: list[Outbox] = []
        self._closing = False
        self._hears = True
        """Whether every stage would notice that it is asked to leave."""
        self._end = EngineEnd(executor, entrance(plans[0]), plans[0].vocab_size)
        self._last_heartbeat = [executor.now()] * self.stages
        self._silence = Silence(self.stages)
        self._patience = Patience(self.stages)
        self._rows: deque[int] = deque()
        """The number of rows of each batch in flight; ``_submitted`` has the time of its submission in seconds."""
        self._submitted: deque[float] = deque()
        self._start_by = [math.inf] * self.stages  # the moment by which each stage has to have started
        self._read = [0] * self.stages
        """Bytes of its layers that each stage had read when its time was last extended."""
        self._totals: dict[int, int] = {}  # what each starting stage has said that it reads
        self._cut_off = ("", "")
        """A host that other hosts do not reach, and the cause. It is cut off unless a better cause is reported."""
        on_broken = partial(self._on_exit, ANY_STAGE, Source.CONNECTION, "its connection to the engine has ended")
        executor.register(self._session, self._on_message, on_broken, self._on_listened)
        for index, plan in enumerate(plans):
            self._processes.append(executor.process_for(plan))
            self._call(index, plan)

    def _call(self, index: int, plan: StagePlan) -> None:
        """Start a process as a stage of this pipeline, or call a running one into it."""
        process = self._processes[index]
        process.watched(partial(self._on_exit, index, Source.PROCESS))
        spec = self._spec(index, plan)
        # With an address it holds the layers already, and is called in its last session, the only one that it admits.
        if process.address:
            self._start_by[index] = self._executor.now() + max(LEAST_PATIENCE, process.patience)
            self._calls.append(self._executor.sockets.connect(process.address, process.session))
            self._calls[-1].send(encode(Rejoin(spec=msgspec.json.encode(spec)), process.session))
        else:
            self._start_by[index] = self._executor.now() + START_TIMEOUT
            process.launcher.start(spec)

    def joined(self) -> bool:
        if self._inboxes:
            return True
        for index in self._lacking:
            if self._executor.now() > self._start_by[index]:
                self._lose(index, Source.STAGE, "it has not started in time")
        self._raise_if_due()
        if len(self.started) < self.stages:
            return False
        self._join()
        return True

    @property
    def _lacking(self) -> list[int]:
        """The stages that have not started yet."""
        return [index for index in range(self.stages) if index not in self.started]

    @property
    def lost(self) -> bool:
        return self._loss.error is not None

    @property
    def ready(self) -> bool:
        return self._end.ready and not self.lost and not self._blame.inquires

    @property
    def exact(self) -> bool:
        return all(started.exact for started in self.started.values())

    @property
    def last_heartbeat(self) -> list[float]:
        return list(self._last_heartbeat)

    @property
    def rank_bytes(self) -> list[list[int]]:
        return [[one.weights + one.kv for one in started.ranks] for _, started in sorted(self.started.items())]

    def submit(self, batch: Batch) -> None:
        self._rows.append(len(batch.rows))
        self._submitted.append(self._executor.now())
        self.tell(0, batch, self._end.sending(batch))

    def cancel(self, message: Cancel) -> None:
        frame = self._packed(message, self._end.sending(message))
        for inbox in self._inboxes:
            inbox.send(frame)

    def tell(self, stage: int, message: Message, arrives: float = 0.0) -> None:
        self._inboxes[stage].send(self._packed(message, arrives))

    def _packed(self, message: Message, arrives: float) -> bytes:
        return encode(message, self._session, arrives, self._executor.now() if self._apart else None)

    def prepare_grammar(self, request: int, grammar: str) -> None:
        self._end.unprepared.add(request)
        self.tell(self.stages - 1, PrepareGrammar(request=request, grammar=grammar))

    def has_grammar(self, request: int) -> bool:
        return request not in self._end.unprepared

    def forget_grammar(self, request: int) -> None:
        self._end.unprepared.discard(request)
        self.tell(self.stages - 1, ForgetGrammar(request=request))

    def listen(self, listener: Callable[[Message], bool]) -> None:
        self._end.listener = listener

    def tap(self, layers: tuple[int, ...]) -> TapSpec:
        address, host = self.started[0].address, self._plans[0].host
        return TapSpec(layers=layers, address=address, session=self._session, host=host)

    def poll(self) -> list[Result]:
        if self._executor.now() >= self._blame.until:
            self._blame.conclude()
        self._raise_if_due()
        return self._end.arrived()

    def _raise_if_due(self) -> None:
        """Raise the loss if it is due. Where only connections were lost, first cut off the host that is not reached."""
        try:
            self._loss.raise_if_due(self._executor.now())
        except PipelineLost:
            if self._loss.source is Source.CONNECTION and self._cut_off[0]:
                self._executor.cut_off(*self._cut_off)
            raise

    @property
    def due(self) -> float | None:
        if self.lost or self._blame.inquires:
            return min(self._loss.at, self._blame.until)
        if self._inboxes:
            return self._end.due
        return min((self._start_by[index] for index in self._lacking), default=None)

    def close(self) -> None:
        """Ask every stage to leave, and kill those that do not in time: at once if one does not respond."""
        for inbox in self._inboxes:
            inbox.send(encode(Stop(), self._session))
        self._leave(self._processes, CLOSE_TIMEOUT if self._inboxes and self._hears else 0.0)

    def release(self) -> None:
        # Before the session ends: how long each stage may be silent depends on the batches in flight.
        allowed = self._allowed()
        kept = [index for index in self.started if self._may_go_on(index)]
        # A kept stage may still be computing its last batch, and answers the next call only after it.
        for index in kept:
            self._processes[index].patience = allowed[index]
        self._leave([process for index, process in enumerate(self._processes) if index not in kept], 0.0)
        self._executor.keep([self._processes[index] for index in kept])

    def _may_go_on(self, index: int) -> bool:
        process = self._processes[index]
        return process.usable and process.launcher.alive

    def _leave(self, ending: Sequence[StageProcess], seconds: float) -> None:
        """End the session and these processes; those that have not left after ``seconds`` are killed."""
        if self._closing:
            return
        self._closing = True
        try:
            # The session goes last: until then ``_wait_until_gone`` still takes in its messages.
            self._executor.end(ending, seconds)
        finally:
            self._executor.unregister(self._session)
            for outbox in (*self._inboxes, *self._calls):
                self._executor.sockets.disconnect(outbox)

    def _join(self) -> None:
        """Tell all stages the addresses of their neighbours, now that all have started."""
        # Not before: the system of each stage may have chosen the port on which the stage listens.
        addresses = [self.started[index].address for index in range(self.stages)]
        try:
            self._inboxes = [self._executor.sockets.connect(address, self._session) for address in addresses]
        except ConfigError as error:
            # A stage on another host names its own address, and may name a wrong one.
            raise PipelineLost(
                f"{self._who(ANY_STAGE)} was lost: a stage says that it listens where it cannot: {error}"
            ) from error
        for index, inbox in enumerate(self._inboxes):
            upstream, downstream = self._neighbours(index)
            inbox.send(encode(ConnectNeighbours(upstream=upstream, downstream=downstream), self._session))

    def _neighbours(self, index: int) -> tuple[str, str]:
        """The addresses before and after a stage. The engine is at both ends:

        around            engine  stage 0  stage 1  ...  stage N-1  engine
        stage i's index   i       i + 1    i + 2
        """
        engine = self._executor.inbox.address
        around = [engine, *(self.started[stage].address for stage in range(self.stages)), engine]
        return around[index], around[index + 2]

    def _spec(self, index: int, plan: StagePlan) -> StageSpec:
        return StageSpec(
            process=self._processes[index].name,
            session=self._session,
            index=index,
            stages=self.stages,
            bind=self._executor.bind_address(self._processes[index].name[:8]),
            engine=self._executor.inbox.address,
            plan=plan,
            link=self._processes[index].link,
            security=self._executor.security,
            private_network=self._executor.private_network,
        )

    def _on_message(self, delivery: Delivery, frames: Sequence[Frame]) -> bool:
        message = delivery.message
        if isinstance(message, Heartbeat) and 0 <= message.stage < len(self._inboxes):
            self._hear(message.stage)
            # Answered as it is read, so that a stage whose engine does not read never queues a second one.
            self._inboxes[message.stage].send(encode(HeartbeatAck(), self._session))
            return False
        if isinstance(message, Loading) and len(self.started) < self.stages and message.stage < self.stages:
            self._give_time(message)
            self._tell_loading(message)
            return False
        if isinstance(message, RanksMeet) and len(self.started) < self.stages and message.stage < self.stages:
            spec = self._spec(message.stage, self._plans[message.stage])
            self._processes[message.stage].meet(spec, message.address, self._executor.bind_address)
            return False
        if isinstance(message, Started) and len(self.started) < self.stages and message.stage < self.stages:
            self.started[message.stage] = message
            process = self._processes[message.stage]
            # From now on it can be called into a later session by this address, under this session's secret.
            process.address, process.session = message.address, self._session
            self._hear(message.stage)
            self._tell_loading(message)
        elif isinstance(message, Failed):
            self._on_failed(message)
        elif isinstance(message, LinkBroken):
            self._on_link_broken(message)
        elif isinstance(message, Recalled) and self._blame.inquires and message.stage < self.stages:
            self._blame.told(message.stage, message.digest)
        else:
            self._take_in(message, delivery.arrives_by(self._executor.now()))
        return True

    def _give_time(self, message: Loading) -> None:
        """Extend the time of a stage that has read more of its layers, and has not contradicted its first total."""
        total = self._totals.setdefault(message.stage, message.total)
        if total >= message.read >= self._read[message.stage] + max(1, PROGRESS * total):
            self._read[message.stage] = message.read
            self._start_by[message.stage] = self._executor.now() + START_TIMEOUT

    def _tell_loading(self, message: Loading | Started) -> None:
        if self._executor.on_loading is not None:
            self._executor.on_loading(self._plans[message.stage].host, self.name, message)

    def _take_in(self, message: Message, arrives: float) -> None:
        """Take in a message of the stream, or one for the listener beside it."""
        if isinstance(message, Result):
            if self._blame.inquires:
                return  # it comes after one that was wrong
            message.spans = [self._by_our_clock(span) for span in message.spans]
        try:
            expected = self._end.received(message, arrives)
        except ProtocolError as error:
            assert isinstance(message, Result), "only results are checked"
            self._inquire(message, str(error))
            return
        if not expected:
            self._lose(ANY_STAGE, Source.STAGE, f"unexpected {type(message).__name__} to the engine")
        elif isinstance(message, Ready):
            self._hear(message.stage)
        elif isinstance(message, Result):
            self._hear(self.stages - 1)
            # Results come in the order of submission, as ``received`` has checked: the oldest entries are this one's.
            self._rows.popleft()
            longest = self._executor.now() - self._submitted.popleft()
            self._patience.computed(message.spans, longest)

    def _by_our_clock(self, span: Span) -> Span:
        """A span with its moments moved from the stage's clock to this one's, roughly; durations stay exact."""
        offset = self._processes[span.stage].launcher.clock_offset if span.stage < self.stages else 0.0
        return span.shifted(-offset) if offset else span

    def _hear(self, stage: int) -> None:
        if 0 <= stage < self.stages:
            self._last_heartbeat[stage] = self._executor.now()
            self._silence.heard(stage)

    def _on_failed(self, message: Failed) -> None:
        """A stage cannot go on: it is lost, or the one before it is, whose batch it could not use."""
        if message.unusable == "batch" and 0 < message.stage < self.stages:  # stage 0 has its batches from the engine
            self._blame.complain(message.stage, f"cannot use what it has sent: {message.cause}", message.details)
        else:  # nobody is at fault who was sent a message by nobody knows whom: that it has ended is all that is known
            source = Source.PROCESS if message.unusable in ("message", "rank") else Source.STAGE
            if message.unusable == "rank" and 0 <= message.stage < self.stages:
                self._processes[message.stage].distrusted = True  # it is about to end, too
            self._lose(message.stage, source, message.cause, message.details)

    def _inquire(self, result: Result, complaint: str) -> None:
        """Ask all stages for the digest of a batch whose result does not fit it."""
        submitted = self._end.submitted(result.stream)
        if submitted is None:  # it has been answered before, and the last stage knows it
            self._lose(self.stages - 1, Source.STAGE, complaint)
            return
        self._blame.inquire(submitted, complaint, self._executor.now() + loss.RECALL_S)
        for stage in range(self.stages):
            self.tell(stage, Recall(stream=result.stream))

    def _on_link_broken(self, told: LinkBroken) -> None:
        """A stage reports that a connection to it has ended, or that it does not reach a neighbour."""
        if not told.to or told.stage >= self.stages:
            self._on_exit(told.stage, Source.CONNECTION, "a connection to it has ended")
            return
        other = told.stage + {"upstream": -1, "downstream": 1}.get(told.to, 0)
        inside = told.to != "drafter" and 0 <= other < self.stages
        name = self._who(other) if inside else "the engine" if told.to != "drafter" else "the drafter"
        tap = self._plans[told.stage].tap if told.to == "drafter" else None
        cause = f"it does not reach {name}: {told.cause}"
        self._on_unreached(told.stage, other if inside else ANY_STAGE, cause, "" if tap is None else tap.host)

    def _on_unreached(self, stage: int, other: int, cause: str, drafter: str = "") -> None:
        """Two stages, or a stage and engine or ``drafter`` (ANY_STAGE), are not connected: mark a host to cut off."""
        # The drafter's host, without which answers go on, then the later stage's; never the engine's own (empty).
        hosts = [self._plans[one].host if one != ANY_STAGE else drafter for one in sorted((stage, other), reverse=True)]
        if hosts[0] != hosts[1]:
            self._cut_off = drafter or hosts[0] or hosts[1], f"{self._who(stage)}: {cause}"
        self._on_exit(stage, Source.CONNECTION, cause)

    def _on_listened(self, seconds: float) -> bool:
        """Whether a stage has been silent for too long. Stages that load or leave are not checked: they say nothing."""
        if not self._inboxes or self._closing or self.lost:
            return False
        for stage, inbox in enumerate(self._inboxes):
            if cause := inbox.unreached:
                self._on_unreached(stage, ANY_STAGE, f"the engine does not reach it: {cause}")
                return True
        self._silence.listened(seconds)
        allowed = self._allowed()
        silent = self._silence.longer_than(allowed)
        if silent is not None:
            self._hears = False
            self._lose(silent, Source.STAGE, f"no sign of life for {allowed[silent]:.0f} s")
        return silent is not None

    def _allowed(self) -> list[float]:
        """Seconds for which each stage may be silent now."""
        fixed = self._executor.stage_timeout
        return self._patience.seconds(max(self._rows, default=0)) if fixed is None else [fixed] * self.stages

    def _on_exit(self, stage: int, source: Source, cause: str) -> None:
        if not self._closing:
            self._lose(stage, source, cause)

    def _lose_for_fault(self, stage: int, cause: str, details: str = "", beside: int = ANY_STAGE) -> None:
        if beside != ANY_STAGE:
            self._processes[beside].distrusted = True
        self._lose(stage, Source.STAGE, cause, details)

    def _lose(self, stage: int, source: Source, cause: str, details: str = "") -> None:
        for index, process in enumerate(self._processes):
            # Distrusted processes are not used again: a stage that failed may hold anything.
            process.distrusted |= source is Source.STAGE and stage in (index, ANY_STAGE)
        error = PipelineLost(f"{self._who(stage)} was lost: {cause}")
        if details:
            error.add_note(details)
        # Only the first report of a loss counts as the host's fault: others follow from it.
        if source is Source.STAGE and not self.lost and 0 <= stage < self.stages and self._plans[stage].host:
            self._executor.faults.note(self._plans[stage].host, cause)
        self._loss.report(source, error, self._executor.now())

    def _who(self, stage: int) -> str:
        if not 0 <= stage < self.stages:
            return f"the pipeline of {self.stages} {self.name}s"
        return f"{self.name} {stage} ({self._plans[stage].label})"
