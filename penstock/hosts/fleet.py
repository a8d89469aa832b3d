"""The hosts of an engine: attached, kept by beats, noticed when they are gone, and asked again until they are back."""

from __future__ import annotations

import ipaddress
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final

from penstock.config import FieldError
from penstock.core import ConfigError
from penstock.hosts.control import (
    BEAT,
    HEAD_DOOR,
    Attached,
    CheckpointFound,
    Fetched,
    Join,
    Message,
    Piece,
    WantPiece,
    decode,
    lease_of,
    same,
)
from penstock.hosts.facts import HostFacts, Versions, own_versions
from penstock.hosts.remote import ANSWER_S, RemoteHost, in_url, places_of
from penstock.hosts.weights.offering import Offer
from penstock.hosts.weights.ranges import Layers
from penstock.messages import ForeignFrame, Frame, MalformedMessage
from penstock.pipeline.silence import Listening
from penstock.transport.addresses import place_of
from penstock.transport.inbox import Inbox
from penstock.transport.security import LinkSecurity
from penstock.transport.sockets import Sockets

log = logging.getLogger(__name__)

NO_ANSWER: Final = (
    f"no answer within {ANSWER_S:.0f} s; is `penstock worker` running there, with keys of the same cluster, and can it "
    "reach this host?"
)
MOST_HOSTS: Final = 256
LEAVE_S: Final = 1.0
"""Seconds for a head's last words to leave."""


class Fleet:
    """Attaches to hosts by their names (HOST or HOST:PORT), and keeps them until ``close``.

    A thread beside the engine's does that, so that hosts stay attached while nobody steps the engine. Raises
    ConfigError for a host that does not answer, or runs other versions. Others may come to ``door``, HOST:PORT of this
    host, until there are MOST_HOSTS.
    """

    def __init__(
        self,
        names: Sequence[str],
        security: LinkSecurity | None = None,
        private_network: bool = False,
        door: str = "",
    ) -> None:
        for i, name in enumerate(names):
            if name in names[:i]:
                raise FieldError("hosts", f"names {name!r} twice")
        self.reached_at, address = own_places(door) if door else beside(address_toward(names[0]))
        self.security = security
        self.private_network = private_network
        self._sockets = Sockets(security, private_network)
        self.hosts: dict[str, RemoteHost] = {name: RemoteHost(name, self._sockets) for name in names}
        """By name. Those that come are added, by the fleet's thread, and none is ever taken away."""
        self._inbox = opened(self._sockets, address)
        if door:
            self._inbox.admit(HEAD_DOOR)
        self._offer: Offer | None = None
        """The checkpoint that every host has to have, or is sent."""
        self.on_return: Callable[[], None] | None = None
        """Called by the fleet's thread when a host can have stages: at first, and whenever it is back."""
        self.on_fetched: Callable[[str, int, int], None] | None = None
        """Called by the fleet's thread with a host's name and the bytes of the checkpoint that it has, and needs."""
        self._news = threading.Condition()
        """Told whenever a host has said something."""
        self._closing = False
        self._woken, self._waker = os.pipe()
        self._inbox.watch(self._woken, self._read_wakes)
        for host in self.hosts.values():
            self._attach(host)
        self._thread = threading.Thread(target=self._run, name="penstock fleet", daemon=True)
        self._thread.start()
        try:
            self._meet()
        except BaseException:
            self.close()
            raise

    @property
    def door(self) -> str:
        """Where others may come to, if they may: HOST:PORT."""
        return self._inbox.address.removeprefix("tcp://")

    @property
    def living(self) -> dict[str, HostFacts]:
        """By name, those that are attached now, but for those that cannot have the checkpoint."""
        known = list(self.hosts.items())
        return {name: host.facts for name, host in known if self._usable(host) and host.facts is not None}

    @property
    def clock_errors(self) -> dict[str, float]:
        """By name, the seconds by which a moment of that host's clock may be wrong by this one's."""
        known = [(name, host.offsets.best) for name, host in list(self.hosts.items())]
        return {name: best.error for name, best in known if best is not None}

    def _usable(self, host: RemoteHost) -> bool:
        return host.alive and (self._offer is None or not host.checkpoints.get(self._offer.path))

    def provide(self, offer: Offer, layers: Mapping[str, Collection[Layers]]) -> None:
        """Have every host that is named hold these layers of the checkpoint: what it lacks, it is sent.

        Returns when all do. A host that comes back is asked again. Raises ConfigError, naming every host that cannot.
        """
        self._offer, path = offer, offer.path
        for host in list(self.hosts.values()):
            if host.attached and not host.has(path, layers.get(host.name, ())):
                host.ask_for(offer.request(layers.get(host.name, ())))
        named = [self.hosts[name] for name in layers]
        self._wait(lambda: all(path in host.checkpoints or not host.attached for host in named))
        problems = [f"host {one.name}: {answer_of(one, path)}" for one in named if answer_of(one, path)]
        if problems:
            raise ConfigError("; ".join(problems))

    def wait_for(self, count: int) -> None:
        """Until so many hosts are there."""
        told = -1
        with self._news:
            while (there := len(self.living)) < count:
                if there != told:
                    log.warning(
                        "waiting for hosts to join at %s: %d of %d are there", self._inbox.address, there, count
                    )
                    told = there
                self._news.wait(BEAT)

    def cut_off(self, name: str, cause: str) -> None:
        """Have a host be lost that this one reaches, since others do not."""
        self.hosts[name].cut_off = f"host {name} was lost: {cause}"

    def close(self) -> None:
        """Leave the hosts, which end what they have started. Safe to call twice."""
        if self._closing:
            return
        self._closing = True
        os.write(self._waker, b"!")
        self._thread.join()
        for host in self.hosts.values():
            host.leave()
        self._inbox.unwatch(self._woken)
        os.close(self._woken)
        os.close(self._waker)
        self._inbox.close()
        self._sockets.close(LEAVE_S)

    # ----------------------------------------------------------------------------------------------------- beginning

    def _meet(self) -> None:
        """Wait for every host's facts, and compare versions. Raises ConfigError."""
        hosts = list(self.hosts.values())
        self._wait(lambda: all(host.alive or host.fault or not host.attached for host in hosts))
        problems = [problem for host in hosts if (problem := problem_with(host))]
        if problems:
            raise ConfigError("; ".join(problems))

    def _wait(self, settled: Callable[[], bool]) -> None:
        """Until that is so, or hosts have had time enough to answer; one that is sent its layers takes as long."""
        deadline = time.monotonic() + ANSWER_S
        with self._news:
            while not settled() and time.monotonic() < deadline:
                self._news.wait(BEAT / 3)  # a connection that is refused makes no news
                if any(host.fetching and host.attached for host in list(self.hosts.values())):
                    deadline = time.monotonic() + ANSWER_S

    def _read_wakes(self) -> None:
        os.read(self._woken, 4096)

    # ----------------------------------------------------------------------------------------------- the fleet's thread

    def _run(self) -> None:
        listening = Listening(time.monotonic(), BEAT)
        while not self._closing:
            self._inbox.wait(listening.next_look)
            for frames in self._inbox.take():
                self._receive(frames)
            for lease in self._inbox.broken():
                self._lose(lease)
            if time.monotonic() >= listening.next_look:
                self._look(listening.look(time.monotonic()))

    def _lose(self, lease: str) -> None:
        """A connection has ended: an agent that lives keeps its own until its head has left."""
        for host in self.hosts.values():
            if host.lease == lease and host.attached:
                host.lose(f"host {host.name} was lost: its connection to this one has ended")

    def _look(self, seconds: float) -> None:
        for host in self.hosts.values():
            host.listened(seconds)
            if host.attached:
                host.beat()
            elif host.wants_back or (host.may_be_asked and not self.living):
                self._attach(host)

    def _refused(self, host: RemoteHost, facts: HostFacts) -> str:
        """Why the agent that has answered is not to be used; empty if it is."""
        if problem := difference(host.name, own_versions(), facts.versions):
            return problem
        others = [one for one in self.hosts.values() if one is not host and one.facts is not None]
        same_agent = [one.name for one in others if one.facts and one.facts.incarnation == facts.incarnation]
        return f"host {host.name} is the same host as {same_agent[0]}; name it once" if same_agent else ""

    def _send(self, host: RemoteHost, wanted: WantPiece) -> None:
        try:
            if self._offer is None:
                raise MalformedMessage("nothing is offered")
            content = self._offer.read(wanted)
        except (MalformedMessage, OSError) as error:
            host.lose(f"host {host.name} was lost: {error}")
            return
        host.send(Piece(path=wanted.path, file=wanted.file, start=wanted.start, end=wanted.end), content)

    def _attach(self, host: RemoteHost) -> None:
        self._inbox.dismiss(host.lease)
        self._inbox.admit(host.attach(self._inbox.address))

    def _welcome(self, message: Message) -> None:
        """Attach to a host that has come. Raises MalformedMessage for what no worker says, and ConfigError."""
        if not isinstance(message, Join) or len(self.hosts) == MOST_HOSTS:
            raise MalformedMessage(f"{type(message).__name__} does not open a head's door, or {MOST_HOSTS} have come")
        if not is_in_numbers(message.host):  # to look a name up may take long
            raise MalformedMessage(f"a worker has come from {message.host!r}, which is no address in numbers")
        _, address = places_of(message.host)
        if all(address != host.address for host in self.hosts.values()):
            log.info("host %s has come", message.host)
            host = self.hosts[message.host] = RemoteHost(message.host, self._sockets)
            self._attach(host)

    def _receive(self, frames: Sequence[Frame]) -> None:
        try:
            lease, raw = lease_of(frames)
            if same(lease, HEAD_DOOR):
                self._welcome(decode(raw))
                return
            host = next((one for one in self.hosts.values() if one.attached and same(one.lease, lease)), None)
            if host is None:
                raise ForeignFrame("it is of a lease that has ended, or never was")
            message = decode(raw)
        except (ForeignFrame, MalformedMessage, ConfigError) as error:
            log.warning("refused a message: %s", error)
            return
        if isinstance(message, Attached) and (problem := self._refused(host, message.facts)):
            host.refuse(problem)
        else:
            host.take(message)
            self._answer(host, message)
        with self._news:
            self._news.notify_all()

    def _answer(self, host: RemoteHost, message: Message) -> None:
        if isinstance(message, Attached):
            for asked in list(host.asked.values()):
                host.ask_for(asked)
        elif isinstance(message, WantPiece):
            self._send(host, message)
        elif isinstance(message, Fetched) and self.on_fetched is not None:
            self.on_fetched(host.name, message.held, message.needed)
        if isinstance(message, Attached | CheckpointFound) and self.on_return is not None and self._usable(host):
            self.on_return()


def problem_with(host: RemoteHost) -> str:
    """Why nothing can be started there; empty if it can."""
    if host.alive:
        return ""
    return f"host {host.name}: {host.fault or NO_ANSWER}" if host.attached else host.cause


def difference(name: str, own: Versions, its: Versions) -> str:
    """What is another one there; empty if nothing is."""
    words = {"protocol": "protocol", "penstock": "Penstock", "torch": "torch"}
    other = [field for field in words if getattr(its, field) != getattr(own, field)]
    said = " and ".join(f"{words[field]} {getattr(its, field)}, this one {getattr(own, field)}" for field in other)
    return f"host {name} has {said}; install the same on both" if other else ""


def answer_of(host: RemoteHost, path: str) -> str:
    if not host.attached:
        return "was lost"
    return host.checkpoints.get(path, f"has not looked for its checkpoint within {ANSWER_S:.0f} s")


def is_in_numbers(host: str) -> bool:
    """Whether HOST:PORT has an address for a host."""
    try:
        ipaddress.ip_address(host.rpartition(":")[0].strip("[]"))
    except ValueError:
        return False
    return True


def beside(host: str) -> tuple[str, str]:
    """This host's address, and a port there that the system chooses."""
    return host, f"tcp://{host}:*"


def own_places(door: str) -> tuple[str, str]:
    """The same of a door. Raises FieldError for an address that tells others nothing."""
    host, address = places_of(door)
    if ipaddress.ip_address(host.strip("[]")).is_unspecified:
        raise FieldError("hosts", f"has workers come to {door}; name the address of this host at which they reach it")
    return host, address


def opened(sockets: Sockets, address: str) -> Inbox:
    try:
        return sockets.inbox(address)
    except OSError as error:
        raise ConfigError(f"hosts: {address.removeprefix('tcp://')}: {error.strerror}") from error


def address_toward(name: str) -> str:
    """This host's address, as that host reaches it. Raises ConfigError where no way leads there."""
    _, address = places_of(name)
    place = place_of(address)
    with socket.socket(place.family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(place.where)  # sends nothing
        except OSError as error:
            raise ConfigError(f"host {name}: {error.strerror}") from error
        return in_url(probe.getsockname()[0])
