"""A host's work for one head: it finds the head's checkpoint, starts its stages, and ends them with the lease.

The agent's own thread keeps leases alive and hands each one's messages to the thread of that lease, which may take its
time. An error there ends this lease with a reason, and no other one.

      agent's thread                              a lease's thread                      threads of its fetches
      beats, the end of silence  --messages-->    stages, probes, questions  --asked-->  hash, fetch
                                 <--it failed--                              <--found--
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Final

from msgspec.structs import replace

from penstock.core import PenstockError
from penstock.hosts import messages
from penstock.hosts.doctor import ProbeProcess
from penstock.hosts.facts import HostFacts
from penstock.hosts.fetching import Fetch, Proved, WeightCache
from penstock.hosts.messages import Refusals
from penstock.hosts.probe import ProbeSpec
from penstock.hosts.weights import OUTSIDE
from penstock.messages import Frame, MalformedMessage, cut
from penstock.pipeline.base import StagePlan, StageSpec
from penstock.pipeline.forkserver import ForkServer
from penstock.transport.addresses import LinkSecurity
from penstock.transport.outbox import Outbox

log = logging.getLogger(__name__)

MOST_STAGES: Final = 256
"""Stages that may run under a lease at a time. A host has no more devices (``facts.MOST_DEVICES``)."""
MOST_CHECKPOINTS: Final = 4
"""Checkpoints that a head may ask for under a lease. An engine has a target and mostly one drafter."""
MOST_MESSAGES: Final = 1024
"""Messages that may wait for a lease's thread. A head beyond that loses its lease, so that it cannot fill the agent's
memory."""
MOST_HELD: Final = 2 * messages.MOST_FRAME
"""Bytes of messages that may wait for a lease's thread. Two of the largest have room."""
MOST_BACKLOG: Final = 4 << 20
"""Bytes that may wait for a head that does not read. A head beyond that loses its lease, so that it cannot fill the
agent's memory."""
END_S: Final = 10.0
"""Seconds that a lease's thread may take to end its processes. The fork server may take as much for itself and its
stages (twice ``forkserver.END_TIMEOUT``)."""


def checkpoints_of(plan: StagePlan) -> list[str]:
    """The head's paths of the checkpoints that a stage reads, each once."""
    return [path for path in dict.fromkeys((plan.model, plan.target, plan.tokenizer)) if path]


class Own:
    """The host's facts, cache, keys and processes; a lease puts them into a stage's spec in place of the head's."""

    def __init__(
        self,
        facts: Callable[[], HostFacts],
        cache: WeightCache | None,
        security: LinkSecurity | None,
        private_network: bool,
        fork_server: Callable[[], ForkServer],
        ends: int,
    ) -> None:
        self.facts = facts
        self.cache = cache
        self.security = security
        self.private_network = private_network
        self.fork_server = fork_server
        self.ends = ends
        """Descriptor of the pipe into which the fork server writes when a stage has ended."""


class Lease:
    """One head, and the processes that were started for it.

    The lease's thread tells ``on_failure`` why the lease has to end. ``in_use`` gives the digests of all copies that
    leases of this host use.
    """

    def __init__(
        self,
        secret: str,
        head: Outbox,
        host: str,
        own: Own,
        in_use: Callable[[], Collection[str]],
        on_failure: Callable[[Lease, str], None],
    ) -> None:
        self.secret = secret
        self.head = head
        self.silent = 0.0
        """Seconds since the head's last message; kept by the agent's thread."""
        self._host = host
        """This host's address, as the head has it."""
        self._own = own
        self._in_use = in_use
        self._on_failure = on_failure
        self._facts: HostFacts | None = None
        self._stages: dict[str, ForkServer] = {}
        """The fork server of each stage that has not ended, by the name of the stage's process."""
        self._fetches: dict[str, Fetch] = {}
        """The fetch for the latest question about each checkpoint, by the head's path of it."""
        self._found: dict[str, Proved | str] = {}
        """The result of that fetch, files or a problem, by the head's path; missing while the fetch goes on."""
        self._waiting: dict[str, list[StageSpec]] = {}
        """Stages that start once their checkpoint is proved, by the head's path of it."""
        self._probe: ProbeProcess | None = None
        self._refusals = Refusals()
        self._work: queue.Queue[tuple[Callable[[], None], int] | None] = queue.Queue(MOST_MESSAGES)
        self._held = 0
        """Bytes of the messages that wait."""
        self._ending = False
        self._lock = threading.Lock()
        """Guards ``_held`` and ``_fetches``, which the agent's thread uses, too."""
        self._thread = threading.Thread(target=self._run, name="penstock lease", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------------------------------- by the agent's thread

    def tell(self, message: messages.Message) -> None:
        """Send the head a message; from any thread. Raises MalformedMessage if it has not read for too long."""
        if self.head.backlog > MOST_BACKLOG:
            raise MalformedMessage("it takes in nothing of what it is told")
        self.head.send(messages.encode(message, self.secret))

    def put(self, message: messages.Message, contents: Sequence[Frame]) -> None:
        """Have the lease's thread obey a message. A piece goes straight to the fetch that waits for it.

        Raises MalformedMessage for a message that is not for an agent, for a piece that no question lists, and if too
        much waits.
        """
        if isinstance(message, messages.Piece):
            with self._lock:
                fetches = list(self._fetches.values())
            if not any(fetch.take(message, contents[0]) for fetch in fetches):
                self._refusals.note(f"piece {message.piece} of {message.file!r} was not asked for, or has come")
            return
        obey = self._obeying(message, contents)
        size = sum(map(len, contents))
        with self._lock:
            if self._held + size > MOST_HELD:
                raise MalformedMessage("it says more than is taken in")
            self._held += size
        self._put(obey, size)

    def note_end(self, process: str, cause: str) -> None:
        """Note that a stage's process has ended, perhaps one of this lease's."""
        self._put(partial(self._tell_ended, process, cause))

    def end(self) -> None:
        """Have the lease's thread end all its processes. Does not wait."""
        self._ending = True  # first: the thread looks at it before each piece of work
        with self._lock:
            fetches = list(self._fetches.values())
        for fetch in fetches:
            fetch.stop()
        while True:  # if the queue is full, work that waits makes room: it is not done any more
            try:
                self._work.put_nowait(None)
                return
            except queue.Full:
                self._work.get_nowait()

    def join(self) -> None:
        """Wait, ``END_S`` seconds at most, for the thread of a lease that was ended."""
        self._thread.join(END_S)

    @property
    def is_ending(self) -> bool:
        """Whether the lease's thread still runs."""
        return self._thread.is_alive()

    @property
    def digests(self) -> set[str]:
        """Digests of the checkpoints that the lease uses. May be read from any thread."""
        with self._lock:
            return {fetch.asked.digest for fetch in self._fetches.values()}

    def _put(self, work: Callable[[], None], size: int = 0) -> None:
        """Queue work for the lease's thread. Raises MalformedMessage if too much waits."""
        try:
            self._work.put_nowait((work, size))
        except queue.Full:
            raise MalformedMessage("it says more than is taken in") from None

    def _obeying(self, message: messages.Message, contents: Sequence[Frame]) -> Callable[[], None]:
        """The work that a message is for the lease's thread. Raises MalformedMessage if it is not for an agent."""
        if isinstance(message, messages.FindCheckpoint):
            return partial(self._find, message, contents[0])
        if isinstance(message, messages.StartStage):
            return partial(self._start, message.spec)
        if isinstance(message, messages.KillStage):
            return partial(self._kill, message.process)
        if isinstance(message, messages.StartProbe):
            return partial(self._start_probe, message)
        raise MalformedMessage(f"{type(message).__name__} is not for an agent")

    # ------------------------------------------------------------------------------------------- by the lease's thread

    def _run(self) -> None:
        try:
            self._facts = self._own.facts()  # on this thread: a GPU driver may take seconds to answer
            self.tell(messages.Attached(facts=self._facts))
            while (work := self._work.get()) is not None and not self._ending:
                do, size = work
                # Work that is being done no longer counts as waiting.
                with self._lock:
                    self._held -= size
                do()
        except PenstockError as error:
            self._on_failure(self, str(error))
        except Exception as error:
            log.exception("a lease has failed")
            self._on_failure(self, f"{type(error).__name__}: {error}")
        finally:
            self._end_all()

    def _end_all(self) -> None:
        """End all processes and fetches of the lease."""
        for process, server in self._stages.items():
            server.kill(process)
            server.forget(process)
        self._stages.clear()
        for fetch in self._fetches.values():
            fetch.stop()
        if self._probe is not None:
            self._probe.end()

    def _start_probe(self, asked: messages.StartProbe) -> None:
        if self._probe is not None:
            raise MalformedMessage("a probe has been started already")
        self._probe = ProbeProcess(
            ProbeSpec(
                name=asked.name,
                session=asked.session,
                bind=f"tcp://{self._host}:*",
                head=asked.head,
                security=self._own.security,
                private_network=self._own.private_network,
            )
        )

    def _find(self, asked: messages.FindCheckpoint, digests: Frame) -> None:
        """Prove that a checkpoint is on this host, or have the head send the needed part of it."""
        before = self._fetches.get(asked.path)
        if before is None and len(self._fetches) == MOST_CHECKPOINTS:
            raise MalformedMessage(f"it asks for more than {MOST_CHECKPOINTS} checkpoints")
        if before is not None:
            before.stop()
        self._begin(Fetch(asked, digests, self._own.cache, self._in_use, self._tell_fetch, self._end_fetch))

    def _begin(self, fetch: Fetch) -> None:
        """Start a fetch in place of an earlier one for the same checkpoint."""
        self._found.pop(fetch.asked.path, None)
        with self._lock:
            self._fetches[fetch.asked.path] = fetch
        fetch.start()  # only now: its first pieces, and its end, look for it there

    def _tell_fetch(self, message: messages.Progress | messages.WantPiece) -> None:
        """Send a fetch's message to the head. Called by the fetch's thread."""
        self.tell(message)

    def _end_fetch(self, fetch: Fetch, found: Proved | str) -> None:
        """Hand a fetch's result to the lease's thread. Called by the fetch's thread as it ends."""
        try:
            self._put(partial(self._take_found, fetch, found))
        except PenstockError as error:
            self._on_failure(self, str(error))

    def _take_found(self, fetch: Fetch, found: Proved | str) -> None:
        """Note a fetch's result, tell the head, and start the stages that have waited for it."""
        path = fetch.asked.path
        if self._fetches.get(path) is not fetch:  # a later question has replaced it
            return
        self._found[path] = found
        problem = "" if isinstance(found, Proved) else found
        self.tell(messages.CheckpointFound(number=fetch.asked.number, problem=problem))
        for spec in self._waiting.pop(path, []):
            self._start(spec)

    # -------------------------------------------------------------------------------------------------------- stages

    def _start(self, spec: StageSpec) -> None:
        """Start a stage from proved files, with this host's paths, address and keys in place of the head's."""
        waiting = [one.process for specs in self._waiting.values() for one in specs]
        if spec.process in [*self._stages, *waiting] or len(self._stages) + len(waiting) == MOST_STAGES:
            raise MalformedMessage(f"it starts a stage twice, or more than {MOST_STAGES}")
        plan = spec.plan
        # Checked anew for each stage: a head may ask for layers, and have stages started, in any order.
        if problem := self._problem_of(plan):
            self._refuse(spec, problem)
            return
        places = dict[str, str]()
        for path in checkpoints_of(plan):
            found = self._found.get(path)
            if isinstance(found, str):
                self._refuse(spec, found)
                return
            if found is None or found.stamps.changed is not None:
                self._start_later(spec, path, changed=found is not None)
                return
            places[path] = str(found.place)
        assert self._facts is not None
        server = self._stages[spec.process] = self._own.fork_server()
        server.listen(spec.process, self._own.ends)
        server.start(
            replace(
                spec,
                plan=replace(
                    plan,
                    model=places[plan.model],
                    target=places.get(plan.target, ""),
                    tokenizer=places.get(plan.tokenizer, ""),
                    gpu=self._facts.uuid(plan.device),
                ),
                bind=f"tcp://{self._host}:*",
                security=self._own.security,
                private_network=self._own.private_network,
            )
        )

    def _problem_of(self, plan: StagePlan) -> str:
        """The reason why a stage is not started; empty if it may be."""
        assert self._facts is not None
        if not self._facts.may_have(plan.device):
            return f"there is no device {plan.device!r}; this host has {self._facts.known}"
        # A learned drafter loads its own checkpoint as a whole, and its target's tensors outside of the layers.
        held, layers = (plan.target, OUTSIDE) if plan.target else (plan.model, (plan.first, plan.last))
        fetch = self._fetches.get(held)
        if fetch is None or layers not in fetch.asked.layers or plan.model not in self._fetches:
            return f"{plan.label} have not been asked for, or sent to this host"
        if plan.tokenizer and plan.tokenizer not in self._fetches:
            return f"the tokenizer at {plan.tokenizer} has not been asked for"
        return ""

    def _start_later(self, spec: StageSpec, path: str, changed: bool) -> None:
        """Start a stage once the files at ``path`` are proved: they are being hashed, or have ``changed`` since."""
        if changed:
            log.warning("files of the checkpoint at %s have changed since they were checked: once more", path)
            self._begin(self._fetches[path].again())
        self._waiting.setdefault(path, []).append(spec)

    def _refuse(self, spec: StageSpec, problem: str) -> None:
        """Tell the head that a stage has ended: it was never started."""
        self.tell(messages.StageEnded(process=spec.process, cause=cut(problem)))

    def _kill(self, process: str) -> None:
        """Kill a stage's process, which waits for its files or runs; its end is reported like any other."""
        if (server := self._stages.get(process)) is not None:
            server.kill(process)
        for path, specs in self._waiting.items():
            for spec in [one for one in specs if one.process == process]:
                self._waiting[path].remove(spec)
                self._refuse(spec, "it was killed before its files were here")

    def _tell_ended(self, process: str, cause: str) -> None:
        """Tell the head that a stage's process has ended, unless it was another lease's."""
        if (server := self._stages.pop(process, None)) is not None:
            server.forget(process)
            self.tell(messages.StageEnded(process=process, cause=cut(cause)))
