"""The agent of a host: starts stages for heads on other hosts, and ends them when their head is gone.

It decides nothing. Each head that attaches has a lease, which lasts for as long as its beats come. What the lease's
stages send and receive never passes the agent.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from penstock.core import ConfigError
from penstock.hosts import control
from penstock.hosts.doctor.probe import ProbeSpec
from penstock.hosts.doctor.probe_process import ProbeProcess
from penstock.hosts.facts import own_facts
from penstock.hosts.weights.cache import WeightCache
from penstock.hosts.weights.digest import digest_of
from penstock.hosts.weights.fetching import Fetch
from penstock.messages import ForeignFrame, Frame, MalformedMessage
from penstock.pipeline.forkserver import ForkServer, shared_fork_server
from penstock.pipeline.plan import StageSpec
from penstock.pipeline.silence import Listening
from penstock.transport.outbox import Outbox
from penstock.transport.security import LinkSecurity
from penstock.transport.sockets import Sockets

log = logging.getLogger(__name__)

MOST_LEASES: Final = 16
"""Heads at a time: who lists hosts is one, too."""


class Lease:
    """One head, and what has been started for it."""

    def __init__(self, secret: str, head: Outbox, host: str) -> None:
        self.secret = secret
        self.host = host
        """This host's address, as the head has it."""
        self.stages: dict[str, ForkServer] = {}
        """By the names of their processes, those that have not ended: who started each."""
        self.silent = 0.0
        """Seconds for which nothing has come of it."""
        self.fetches: dict[str, Fetch] = {}
        """By the head's paths, what is or was sent of checkpoints that are not here."""
        self.copies: dict[str, Path] = {}
        """By the head's paths, where that is."""
        self.probe: ProbeProcess | None = None
        self.head = head

    def tell(self, message: control.Message) -> None:
        self.head.send(control.encode(message, self.secret))


class HostAgent:
    """Listens at an address, and serves heads until ``stop``.

    With ``security`` whoever talks to it or its stages shows a certificate of the cluster's. Without, the address has
    to be this host's own, or the network private. Raises ConfigError for an address that cannot be, and OSError for
    one that is taken. Checkpoints that are not here are fetched into ``cache``.
    """

    def __init__(
        self,
        address: str,
        security: LinkSecurity | None = None,
        private_network: bool = False,
        cache: WeightCache | None = None,
    ) -> None:
        self._cache = cache
        self._security = security
        self._private_network = private_network
        self._incarnation = secrets.token_hex(8)
        self._sockets = Sockets(security, private_network)
        self._inbox = self._sockets.inbox(address)
        self._inbox.admit(control.DOOR)
        self._ends, self._end_pipe = os.pipe()
        self._inbox.watch(self._ends, self._report_ends)
        self._leases: dict[str, Lease] = {}
        self._listening = Listening(time.monotonic(), control.BEAT)
        self._stopped = False
        shared_fork_server()  # it imports torch before anybody waits for that

    @property
    def address(self) -> str:
        """Where heads attach."""
        return self._inbox.address

    def serve(self) -> None:
        while not self._stopped:
            self._inbox.wait(self._listening.next_look)
            for frames in self._inbox.take():
                self._receive(frames)
            if time.monotonic() >= self._listening.next_look:
                self._look()

    def stop(self) -> None:
        """Have ``serve`` return within a beat. May be called from any thread."""
        self._stopped = True

    def close(self) -> None:
        """End what was started for anybody."""
        for lease in list(self._leases.values()):
            self._end(lease, "the agent leaves")
        self._inbox.unwatch(self._ends)
        os.close(self._ends)
        os.close(self._end_pipe)
        self._inbox.close()
        self._sockets.close()

    def __enter__(self) -> HostAgent:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    # ------------------------------------------------------------------------------------------------------- leases

    def _look(self) -> None:
        """End the leases of heads that have said nothing for too long."""
        seconds = self._listening.look(time.monotonic())
        for lease in list(self._leases.values()):
            lease.silent += seconds
            if lease.silent > control.LEASE:
                self._end(lease, f"its head has said nothing for {control.LEASE:.1f} s")

    def _attach(self, secret: str, attach: control.Attach) -> None:
        if len(self._leases) == MOST_LEASES:
            log.warning("refused a head at %s: %d are attached already", attach.head, MOST_LEASES)
            return
        lease = self._leases[secret] = Lease(secret, self._sockets.connect(attach.head, secret), attach.host)
        log.info("head %s has attached", attach.head)
        lease.tell(control.Attached(facts=own_facts(self._incarnation)))

    def _end(self, lease: Lease, why: str) -> None:
        del self._leases[lease.secret]
        if lease.stages:
            log.warning("a lease has ended: %s; so do its stages", why)
        for process, server in lease.stages.items():
            server.kill(process)
            server.forget(process)
        for fetch in lease.fetches.values():
            fetch.stop()
        if lease.probe is not None:
            lease.probe.end()
        self._sockets.disconnect(lease.head)

    # ------------------------------------------------------------------------------------------------- what heads say

    def _receive(self, frames: Sequence[Frame]) -> None:
        try:
            secret, raw = control.lease_of(frames)
            message = control.decode(raw)
            lease = next((one for one in self._leases.values() if control.same(one.secret, secret)), None)
            if lease is not None:
                lease.silent = 0.0
                self._obey(lease, message, frames[1:])
            elif isinstance(message, control.Attach):
                self._attach(secret, message)
            else:
                raise ForeignFrame("it is of a lease that has ended, or never was")
        except (ConfigError, ForeignFrame, MalformedMessage) as error:
            log.warning("refused a message: %s", error)

    def _obey(self, lease: Lease, message: control.Message, contents: Sequence[Frame]) -> None:
        now = time.monotonic()
        if isinstance(message, control.Beat):
            lease.tell(control.BeatAnswer(sent=message.sent, received=now, answered=time.monotonic()))
        elif isinstance(message, control.FindCheckpoint):
            self._find(lease, message)
        elif isinstance(message, control.Piece):
            if message.path in lease.fetches and len(contents) == 1:
                lease.fetches[message.path].take(message, bytes(contents[0]))
        elif isinstance(message, control.StartStage):
            self._start(lease, message.spec)
        elif isinstance(message, control.KillStage):
            if (server := lease.stages.get(message.process)) is not None:
                server.kill(message.process)
        elif isinstance(message, control.StartProbe):
            self._start_probe(lease, message)
        elif isinstance(message, control.Detach):
            self._end(lease, "its head has left")
        else:
            raise MalformedMessage(f"{type(message).__name__} is not for an agent")

    def _start_probe(self, lease: Lease, asked: control.StartProbe) -> None:
        if lease.probe is not None:
            raise MalformedMessage("a probe has been started already")
        lease.probe = ProbeProcess(
            ProbeSpec(
                name=asked.name,
                session=asked.session,
                bind=f"tcp://{lease.host}:*",
                head=asked.head,
                security=self._security,
                private_network=self._private_network,
            )
        )

    def _find(self, lease: Lease, asked: control.FindCheckpoint) -> None:
        """Say whether a checkpoint is here, or have the head send what is needed of it."""
        if (before := lease.fetches.pop(asked.path, None)) is not None:
            before.stop()
        lease.copies.pop(asked.path, None)
        problem = problem_of(asked)
        if not problem or self._cache is None:
            lease.tell(control.CheckpointFound(path=asked.path, problem=problem))
            return
        log.info("%s; its layers come from the head", problem)
        lease.tell(control.CheckpointFound(path=asked.path, fetched=True))
        in_use = {fetch.asked.digest for one in self._leases.values() for fetch in one.fetches.values()}
        kept = partial(lease.copies.__setitem__, asked.path)
        lease.fetches[asked.path] = Fetch(asked, self._cache, in_use, lease.tell, kept)

    # -------------------------------------------------------------------------------------------------------- stages

    def _start(self, lease: Lease, spec: StageSpec) -> None:
        """Start a stage with what is this host's own in place of the head's."""
        server = lease.stages[spec.process] = shared_fork_server()
        server.listen(spec.process, self._end_pipe)
        plan = spec.plan
        if (fetch := lease.fetches.get(plan.model)) is not None:
            if plan.model not in lease.copies or (plan.first, plan.last) not in fetch.asked.layers:
                self._tell_ended(lease, spec.process, f"{plan.label} have not been sent to its host")
                return
            plan = replace(plan, model=str(lease.copies[plan.model]))
        server.start(
            replace(
                spec,
                plan=plan,
                bind=f"tcp://{lease.host}:*",
                security=self._security,
                private_network=self._private_network,
            )
        )

    def _report_ends(self) -> None:
        """Tell heads which stages have ended. Lines are short, so the pipe never holds half of one."""
        for line in os.read(self._ends, 65536).splitlines():
            told = json.loads(line)
            for lease in self._leases.values():
                if told["process"] in lease.stages:
                    self._tell_ended(lease, told["process"], told["cause"])

    def _tell_ended(self, lease: Lease, process: str, cause: str) -> None:
        lease.stages.pop(process).forget(process)
        lease.tell(control.StageEnded(process=process, cause=cause))


def problem_of(asked: control.FindCheckpoint) -> str:
    """Why stages here cannot load a checkpoint; empty if they can."""
    path = Path(asked.path)
    try:
        found = digest_of(path)
    except OSError as error:
        return f"there is no checkpoint at {path}: {error.strerror}"
    return "" if found == asked.digest else f"the checkpoint at {path} is another one"
