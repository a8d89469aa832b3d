"""The hosts of an engine: their leases, losses and returns, and the executor that runs stages on them."""

from __future__ import annotations

import ipaddress
import logging
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final, Protocol

from penstock.config import FieldError
from penstock.core import ConfigError
from penstock.hosts.facts import HostFacts, Versions, own_versions
from penstock.hosts.fetching import Offer
from penstock.hosts.messages import (
    BEAT,
    HEAD_DOOR,
    MOST_FRAME,
    Attached,
    BeatAnswer,
    Join,
    Message,
    Refusals,
    WantPiece,
    decode,
    lease_of,
    same,
)
from penstock.hosts.remote import ANSWER_S, RemoteHost, name_and_address
from penstock.hosts.weights import Held
from penstock.messages import ForeignFrame, Frame, Loading, MalformedMessage, cut
from penstock.pipeline.base import Elsewhere
from penstock.pipeline.loss import Listening
from penstock.pipeline.processes import OnLoading, ProcessExecutor
from penstock.pipeline.stage_process import FETCH
from penstock.transport.addresses import LinkSecurity, in_url, place_of
from penstock.transport.inbox import Inbox
from penstock.transport.outbox import Sockets

# ---------------------------------------------------------------------------------------------------------------- fleet
# The hosts of an engine: attaches to them, keeps their leases by beats, notices losses, and asks lost ones again.

log = logging.getLogger(__name__)

RUNNING: Final = "`penstock worker` has to run there, with keys that `penstock keys add` of this cluster has given it"
"""The remedy where there is no connection to a host."""
NO_ANSWER: Final = (
    f"no answer within {ANSWER_S:.0f} s; is `penstock worker` running there, with keys of the same cluster, and can it "
    "reach this host?"
)
MOST_HOSTS: Final = 256
"""Hosts of one engine, those that joined included. The largest models have 128 layers, and a stage has at least one."""
LOOK_S: Final = BEAT / 3
"""Seconds between two looks at the hosts' answers while a caller waits for them. It is a third of a beat, so that an
answer is seen before the next one is due."""
LEAVE_S: Final = 1.0
"""Seconds for a head's last messages to leave. A host that does not read them within that leaves them unread."""


TELLS_NOTHING: Final = (BeatAnswer, WantPiece)
"""Messages for which nobody who waits for news need be woken."""


class HostsLost(ConfigError):
    """Hosts that nothing is wrong with but that they were lost; ``names`` are theirs. They may come back."""

    def __init__(self, message: str, names: Sequence[str]) -> None:
        super().__init__(message)
        self.names = names


class Fleet:
    """Attaches to hosts by their names (HOST or HOST:PORT), and keeps them until ``close``.

    A thread of its own does that, so that hosts stay attached while nobody steps the engine. Raises ConfigError for a
    host that does not answer, or runs other versions. Other hosts may come to ``door``, HOST:PORT of this host, until
    there are MOST_HOSTS.
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
        """Hosts by name. The fleet's thread adds those that come, and removes only those that have never answered."""
        self._inbox = opened(self._sockets, address)
        if door:
            self._inbox.admit(HEAD_DOOR)
        self._named = frozenset(names)
        self.on_news: Callable[[], None] | None = None
        """Called by the fleet's thread when hosts may have come, gone, or got their layers."""
        self.on_fetched: Callable[[str, int, int], None] | None = None
        """Called by a thread that waits, with a host's name and the bytes of its layers that it holds, and needs."""
        self._news = threading.Condition()
        """Notified on news of a host; its lock guards ``hosts`` against changes."""
        self._refusals = Refusals()
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
        """HOST:PORT at which other hosts may come, if they may."""
        return self._inbox.address.removeprefix("tcp://")

    @property
    def living(self) -> dict[str, HostFacts]:
        """Facts by name of the hosts that are attached now, except those that cannot get the checkpoint: a snapshot."""
        with self._news:
            known = [(name, host, host.facts) for name, host in self.hosts.items()]
            return {name: facts for name, host, facts in known if facts is not None and host.alive and not host.problem}

    @property
    def searching(self) -> frozenset[str]:
        """Names of the hosts that have yet to say whether they hold the layers that they were asked for."""
        return frozenset(name for name, host in list(self.hosts.items()) if host.alive and host.searching)

    @property
    def clock_errors(self) -> dict[str, float]:
        """Seconds by which each host's clock offset may be wrong, by the host's name."""
        known = [(name, host.offsets.best) for name, host in list(self.hosts.items())]
        return {name: best.error for name, best in known if best is not None}

    def ask(self, offer: Offer, layers: Mapping[str, Collection[Held]]) -> None:
        """Ask every host that ``layers`` names to get hold of its layers. Does not wait.

        A host that comes back is asked again. Raises OSError, and ConfigError for a damaged file.
        """
        for name, some in layers.items():
            self.hosts[name].ask(offer, some)

    def hold(self, offer: Offer, layers: Mapping[str, Collection[Held]]) -> bool:
        """Whether every host that ``layers`` names holds its layers."""
        return all(self.hosts[name].alive and self.hosts[name].holds(offer, some) for name, some in layers.items())

    def settled(self, names: Iterable[str]) -> bool:
        """Whether each of these hosts has said whether it holds its layers, or is gone."""
        hosts = [self.hosts[name] for name in names]
        return all(not host.attached or (host.alive and not host.searching) for host in hosts)

    def check(self, names: Iterable[str]) -> None:
        """Raise ConfigError, naming each of these hosts that does not hold its layers; HostsLost if all were lost."""
        wrong = [one for name in names if (one := self.hosts[name]).problem or not one.attached]
        if not wrong:
            return
        problems = "; ".join(f"host {one.name}: {one.problem}" if one.attached else one.cause for one in wrong)
        if any(one.attached for one in wrong):
            raise ConfigError(problems)
        raise HostsLost(problems, [one.name for one in wrong])

    def provide(self, offer: Offer, layers: Mapping[str, Collection[Held]]) -> None:
        """Ask every host that ``layers`` names to get hold of its layers, and wait until all hold them.

        Raises ConfigError, naming every host that cannot, HostsLost if they were lost, and OSError.
        """
        self.ask(offer, layers)
        with self._news:
            while not self.settled(layers):
                self.tell_progress()
                self._news.wait(LOOK_S)
        self.tell_progress()
        self.check(layers)

    def tell_progress(self) -> None:
        """Tell ``on_fetched`` how far each host is that is being sent its layers."""
        if self.on_fetched is not None:
            for name, host in list(self.hosts.items()):
                if (progress := host.progress) is not None:
                    self.on_fetched(name, *progress)

    def joined_by(self, names: Sequence[str]) -> dict[str, HostFacts]:
        """The facts of all hosts that are there, once all of ``names`` are: a lost one is waited for, for ``ANSWER_S``.

        Raises ConfigError, naming each that is not there by then.
        """
        deadline = time.monotonic() + ANSWER_S
        with self._news:
            while (missing := [name for name in names if name not in (living := self.living)]) and (
                time.monotonic() < deadline
            ):
                self._news.wait(LOOK_S)
        if missing:
            hosts = [self.hosts[name] for name in missing]
            raise ConfigError("; ".join(problem_with(one) or f"host {one.name}: {one.problem}" for one in hosts))
        return living

    def wait_for(self, count: int, seconds: float = math.inf) -> None:
        """Wait until ``count`` hosts are there; the log says how many are.

        Raises ConfigError if they are not after so many seconds.
        """
        told, deadline = -1, time.monotonic() + seconds
        with self._news:
            while (there := len(self.living)) < count:
                if time.monotonic() >= deadline:
                    raise ConfigError(f"hosts: {there} of {count} have come to {self.door} within {seconds:.0f} s")
                if there != told:
                    log.warning(
                        "waiting for hosts to join at %s: %d of %d are there", self._inbox.address, there, count
                    )
                    told = there
                self._news.wait(BEAT)

    def cut_off(self, name: str, cause: str) -> None:
        """Have a host count as lost that other hosts do not reach, though this one does."""
        self.hosts[name].cut_off = f"host {name} was lost: {cause}"

    def close(self) -> None:
        """Leave the hosts, which then end the processes that they have started. Safe to call twice."""
        if self._closing:
            return
        self._closing = True
        os.write(self._waker, b"!")
        self._thread.join()
        for host in self.hosts.values():
            # The thread has ended, so that nothing is sent to a host behind this farewell.
            host.leave()
            host.end()
        self._inbox.unwatch(self._woken)
        os.close(self._woken)
        os.close(self._waker)
        self._inbox.close()
        self._sockets.close(LEAVE_S)

    # ----------------------------------------------------------------------------------------------------- beginning

    def _meet(self) -> None:
        """Wait for every host's facts, and compare versions.

        Raises ConfigError, naming the hosts, where one does not answer in time or has another version.
        """
        hosts = list(self.hosts.values())
        deadline = time.monotonic() + ANSWER_S
        with self._news:
            while not all(host.alive or host.fault or not host.attached for host in hosts):
                if time.monotonic() >= deadline:
                    break
                self._news.wait(LOOK_S)  # a connection that is refused makes no news
        problems = [problem for host in hosts if (problem := problem_with(host))]
        if problems:
            raise ConfigError("; ".join(problems))

    def _read_wakes(self) -> None:
        """Empty the pipe by which ``close`` wakes the fleet's thread."""
        os.read(self._woken, 4096)

    # ----------------------------------------------------------------------------------------------- the fleet's thread

    def _run(self) -> None:
        listening = Listening(time.monotonic(), BEAT)
        while not self._closing:
            try:
                self._step(listening)
            except Exception as error:
                log.exception("hosts could not be kept")
                for host in list(self.hosts.values()):
                    if host.attached:
                        host.leave()
                        host.lose(f"host {host.name} was lost: {type(error).__name__} at this host: {error}")
                self._tell_news()

    def _step(self, listening: Listening) -> None:
        """Wait for messages or the next look, and obey either."""
        self._inbox.wait(listening.next_look)
        # Messages first: a host's last one may say why its connection has ended.
        for frames in self._inbox.take():
            self._receive(frames)
        for lease in self._inbox.broken():
            self._lose(lease)
        if time.monotonic() >= listening.next_look:
            self._look(listening.look(time.monotonic()))

    def _tell_news(self) -> None:
        """Wake those who wait for hosts, and call ``on_news``."""
        with self._news:
            self._news.notify_all()
        if self.on_news is not None:
            self.on_news()

    def _lose(self, lease: str) -> None:
        """Lose the host whose connection has ended: an agent that lives keeps it open until its head has left."""
        for host in self.hosts.values():
            if host.lease == lease and host.attached:
                host.lose(f"host {host.name} was lost: its connection to this one has ended")
                self._tell_news()

    def _look(self, seconds: float) -> None:
        """Beat to the hosts that are attached, lose the silent ones, and ask lost ones again when it is time."""
        for host in list(self.hosts.values()):
            was_there = host.attached
            host.listened(seconds)
            if host.attached:
                host.beat()
            elif was_there:
                self._tell_news()
            elif not host.came_once and host.name not in self._named:
                self._forget(host)
            elif host.wants_back or (host.may_be_asked and not self.living):
                self._attach(host)

    def _forget(self, host: RemoteHost) -> None:
        """Remove a host that was announced at the door and has never answered: anybody may have announced it."""
        self._inbox.dismiss(host.lease)
        with self._news:
            del self.hosts[host.name]

    def _refused(self, host: RemoteHost, facts: HostFacts) -> str:
        """The reason why the agent that has answered cannot be used; empty if it can."""
        if problem := difference(host.name, own_versions(), facts.versions):
            return problem
        others = [one for one in self.hosts.values() if one is not host and one.facts is not None]
        # One agent under two names would have its devices counted twice.
        same_agent = [one.name for one in others if one.facts and one.facts.incarnation == facts.incarnation]
        return f"host {host.name} is the same host as {same_agent[0]}; name it once" if same_agent else ""

    def _attach(self, host: RemoteHost) -> None:
        """Begin a lease with a host, the first one or the next."""
        self._inbox.dismiss(host.lease)  # frames of the host's last lease are refused from now on
        self._inbox.admit(host.attach(self._inbox.address))

    def _welcome(self, message: Message) -> None:
        """Attach to a host that has come to the door.

        Raises MalformedMessage for other messages, and ConfigError for a host that has no place.
        """
        if not isinstance(message, Join):
            raise MalformedMessage(f"{type(message).__name__} does not open a head's door")
        _, address = name_and_address(message.host)
        if any(address == host.address for host in self.hosts.values()):
            return  # a worker says again and again that it is there
        if len(self.hosts) >= MOST_HOSTS:
            raise ConfigError(f"host {message.host} has come, and has no place: {MOST_HOSTS} are the most")
        log.info("host %s has come", message.host)
        host = RemoteHost(message.host, self._sockets)
        with self._news:
            self.hosts[message.host] = host
        self._attach(host)

    def _receive(self, frames: Sequence[Frame]) -> None:
        """Take in a message, or refuse it; whatever is wrong with it costs its own host and no other."""
        host = None
        try:
            lease, raw = lease_of(frames)
            if same(lease, HEAD_DOOR):
                self._welcome(decode(raw, frames[1:]))
                return
            host = next((one for one in self.hosts.values() if one.attached and same(one.lease, lease)), None)
            if host is None:
                raise ForeignFrame("it is of a lease that has ended, or never was")
            self._take(host, decode(raw, frames[1:]))
        except (ForeignFrame, MalformedMessage, ConfigError) as error:
            self._refuse(host, str(error))
        except Exception as error:
            log.exception("a message could not be taken in")
            self._refuse(host, f"{type(error).__name__}: {error}")

    def _take(self, host: RemoteHost, message: Message) -> None:
        """Hand a message to the host under whose lease it came, and tell the news that it may be."""
        if isinstance(message, Attached) and (problem := self._refused(host, message.facts)):
            host.refuse(problem)
        else:
            host.take(message)
        if isinstance(message, TELLS_NOTHING):
            return
        self._tell_news()

    def _refuse(self, host: RemoteHost | None, why: str) -> None:
        """Log why a message is refused, and lose the host under whose lease it came."""
        self._refusals.note(why)
        if host is not None and host.attached:
            host.leave()
            host.lose(f"host {host.name} was lost: it has sent a message that makes no sense: {cut(why, 300)}")
            self._tell_news()


def problem_with(host: RemoteHost) -> str:
    """The reason why nothing can be started on a host; empty if it can."""
    if host.alive:
        return ""
    if not host.attached:
        return host.cause
    return f"host {host.name}: {f'{host.fault}; {RUNNING}' if host.fault else NO_ANSWER}"


def difference(name: str, own: Versions, its: Versions) -> str:
    """A message about versions of the host that differ from ``own``; empty if none does."""
    words = {"protocol": "protocol", "penstock": "Penstock", "torch": "torch"}
    other = [field for field in words if getattr(its, field) != getattr(own, field)]
    said = " and ".join(f"{words[field]} {getattr(its, field)}, this one {getattr(own, field)}" for field in other)
    return f"host {name} has {said}; install the same on both" if other else ""


def beside(host: str) -> tuple[str, str]:
    """This host's address, and a port there that the system chooses."""
    return host, f"tcp://{host}:*"


def own_places(door: str) -> tuple[str, str]:
    """The address of a door on this host, and as an inbox takes it. Raises FieldError for 0.0.0.0 or ::.

    Other hosts cannot dial those.
    """
    host, address = name_and_address(door, least_port=0)
    if ipaddress.ip_address(host.strip("[]")).is_unspecified:
        raise FieldError("hosts", f"has workers come to {door}; name the address of this host at which they reach it")
    return host, address


def opened(sockets: Sockets, address: str) -> Inbox:
    """An inbox at an address. Raises ConfigError for one that is not this host's, or is taken."""
    try:
        return sockets.inbox(address, MOST_FRAME)
    except OSError as error:
        raise ConfigError(f"hosts: {address.removeprefix('tcp://')}: {error.strerror}") from error


def address_toward(name: str, field: str = "hosts") -> str:
    """This host's address, as the host ``name`` reaches it. Raises ConfigError if there is no route to that host."""
    _, address = name_and_address(name, field)
    place = place_of(address)
    with socket.socket(place.family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(place.where)  # a datagram socket sends nothing yet, it only chooses its own address
        except OSError as error:
            raise ConfigError(f"host {name}: {error.strerror}") from error
        return in_url(probe.getsockname()[0])


# ----------------------------------------------------------------------------------------------------------------- host
# The ``Executor`` that runs an engine's stages on several hosts.


def tell_fetched(on_loading: OnLoading, host: str, held: int, needed: int) -> None:
    """Report a host's bytes of its layers as the progress of a stage that loads."""
    on_loading(host, FETCH, Loading(stage=0, read=held, total=needed))


class Closing(Protocol):
    """Something that ends with an executor, such as the worker processes that an engine has started."""

    def close(self) -> None: ...


class FleetExecutor(ProcessExecutor):
    """Runs stages on a fleet's hosts and on this one. ``close`` also closes the fleet, then ``started_by``."""

    def __init__(
        self,
        fleet: Fleet,
        stage_timeout: float | None = None,
        on_loading: OnLoading | None = None,
        started_by: Closing | None = None,
    ) -> None:
        self.fleet = fleet
        self._started_by = started_by
        elsewhere = Elsewhere(fleet.hosts, fleet.reached_at, fleet.cut_off, fleet.private_network)
        super().__init__("tcp", stage_timeout, fleet.security, on_loading, elsewhere)
        self._offers: dict[str, Offer] = {}
        """The checkpoints that hosts are to hold, by path, each as it was when first asked for."""
        fleet.on_news = self.wake
        if on_loading is not None:
            fleet.on_fetched = partial(tell_fetched, on_loading)

    def offer(self, source: Path, layers: int | None) -> Offer:
        """The checkpoint at ``source``, of ``layers`` layers, for other hosts; its bytes are hashed only once.

        None has it sent as a whole. Raises OSError, ConfigError, and CheckpointChanged if its files have changed since.
        """
        offer = self._offers.get(str(source))
        if offer is None:
            offer = self._offers[str(source)] = Offer(source, layers)
        offer.check()
        return offer

    def close(self) -> None:
        super().close()
        self.fleet.close()
        if self._started_by is not None:
            self._started_by.close()
