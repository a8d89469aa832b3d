"""``penstock worker``: its process, its systemd unit, and the agent with its leases and the engine that it joins."""

from __future__ import annotations

import getpass
import ipaddress
import json
import logging
import os
import queue
import secrets
import signal
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Final

from penstock.config import FieldError, check
from penstock.core import ConfigError
from penstock.environment import LAN, require
from penstock.hosts import messages
from penstock.hosts.facts import own_facts
from penstock.hosts.fetching import WeightCache, cache_for
from penstock.hosts.fleet import address_toward
from penstock.hosts.keys import folder_of, join, own_name, security_for
from penstock.hosts.lease import Lease, Own
from penstock.hosts.messages import DEFAULT_PORT, HEAD_DOOR, Join, Refusals, encode
from penstock.hosts.remote import name_and_address
from penstock.messages import ForeignFrame, Frame, MalformedMessage, cut
from penstock.pipeline.forkserver import ForkServer, shared_fork_server
from penstock.pipeline.loss import Listening
from penstock.transport.addresses import LinkSecurity, Place, is_unspecified, listener_at, place_of
from penstock.transport.outbox import Outbox, Sockets

# ---------------------------------------------------------------------------------------------------------------- agent
# The agent of a host: serves heads (engines on other hosts), and ends the processes of those that are gone.
#
# It decides nothing. Each head that attaches has a lease, which lasts for as long as its beats come. The agent's thread
# only keeps leases: work that may take time, or fail, is done by the threads of the leases. Messages of stages never
# pass the agent.

log = logging.getLogger(__name__)

MOST_LEASES: Final = 16
"""Most heads at a time; `penstock hosts`, which lists hosts, is one while it runs. Each has a thread of the agent's."""
FAREWELL_S: Final = 2.0
"""Seconds for the last message of a lease to leave. It is one short message, and a head that does not read it may not
hold a connection."""
MOST_FAREWELLS: Final = 64
"""Heads that can be refused at a time; further ones are cut off unanswered."""


class HostAgent:
    """Listens at an address, and serves heads until ``stop``.

    With ``security`` everybody who talks to it or its stages has to show a certificate of the cluster's. Without, the
    address has to be a loopback one, or the network private. Raises ConfigError for an invalid address, and OSError for
    one that is taken. Checkpoints that are not on this host are fetched into ``cache``.
    """

    def __init__(
        self,
        address: str,
        security: LinkSecurity | None = None,
        private_network: bool = False,
        cache: WeightCache | None = None,
    ) -> None:
        self._incarnation = secrets.token_hex(8)
        self._sockets = Sockets(security, private_network)
        self._inbox = self._sockets.inbox(address, messages.MOST_FRAME)
        self._inbox.admit(messages.DOOR)
        self._ends, self._end_pipe = os.pipe()
        self._inbox.watch(self._ends, self._report_ends)
        self._failed: queue.SimpleQueue[tuple[Lease, str]] = queue.SimpleQueue()
        """Leases that have to end, each with the reason; any thread may put one here."""
        self._woken, self._waker = os.pipe()
        self._inbox.watch(self._woken, self._end_failed)
        self._leases: dict[str, Lease] = {}
        self._ended: list[Lease] = []
        """Leases whose threads may still be ending their processes."""
        self._farewells: list[tuple[Outbox, float]] = []
        """Connections to heads whose leases have ended, and until when their last message may leave."""
        self._listening = Listening(time.monotonic(), messages.BEAT)
        self._refusals = Refusals()
        self._stopped = False
        self._fork_lock = threading.Lock()
        self._own = Own(
            lambda: own_facts(self._incarnation),
            cache,
            security,
            private_network,
            self._fork_server,
            self._end_pipe,
        )
        self._fork_server()  # it imports torch now, before anybody waits for that

    @property
    def address(self) -> str:
        """The address at which heads attach, tcp://HOST:PORT."""
        return self._inbox.address

    def serve(self) -> None:
        """Serve heads on this thread until ``stop`` is called."""
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
        """End all leases with all processes that were started under them."""
        # Leases first: their threads, and processes that end, write into the pipes that are closed below.
        for lease in list(self._leases.values()):
            self._end(lease, "the agent leaves")
        for lease in self._ended:
            lease.join()
        for fd in (self._ends, self._woken):
            self._inbox.unwatch(fd)
        for fd in (self._ends, self._end_pipe, self._woken, self._waker):
            os.close(fd)
        self._inbox.close()
        self._sockets.close()

    def __enter__(self) -> HostAgent:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _fork_server(self) -> ForkServer:
        """The host's fork server, started if need be. Threads of leases ask for it, too."""
        with self._fork_lock:
            return shared_fork_server()

    # ------------------------------------------------------------------------------------------------------- leases

    def _look(self) -> None:
        """End the leases of heads that have said nothing for too long."""
        seconds = self._listening.look(time.monotonic())
        for lease in list(self._leases.values()):
            lease.silent += seconds
            if lease.silent > messages.LEASE:
                self._end(lease, f"its head has said nothing for {messages.LEASE:.1f} s")
        self._ended = [lease for lease in self._ended if lease.is_ending]
        left = [one for one in self._farewells if one[0].backlog and time.monotonic() < one[1]]
        for head, _ in [one for one in self._farewells if one not in left]:
            self._sockets.disconnect(head)
        self._farewells = left

    def _attach(self, secret: str, attach: messages.Attach) -> None:
        """Begin a lease with a head, or tell the head why it gets none."""
        if len(self._farewells) >= MOST_FAREWELLS:
            raise MalformedMessage(f"{MOST_FAREWELLS} heads are being told that they are not served")
        head = self._sockets.connect(attach.head, secret)
        if problem := self._problem_of(attach):
            self._refusals.note(problem)
            self._bid_farewell(head, secret, problem)
            return
        self._leases[secret] = Lease(secret, head, attach.host, self._own, self._in_use, self._fail)
        log.info("head %s has attached", attach.head)

    def _problem_of(self, attach: messages.Attach) -> str:
        """The reason why a head is not served; empty if it is."""
        # Stages listen at the address that the head states, and tell it to others: it has to be this host's.
        own = self.address.removeprefix("tcp://").rpartition(":")[0]
        if is_unspecified(attach.host) or (not is_unspecified(own) and attach.host != own):
            return f"it takes {attach.host} for this host's address, which listens at {own}"
        if len(self._leases) == MOST_LEASES:
            return f"{MOST_LEASES} heads are attached already"
        return ""

    def _in_use(self) -> set[str]:
        """The digests of all copies that leases use. May be called from any thread."""
        return set[str]().union(*(lease.digests for lease in list(self._leases.values())))

    def _fail(self, lease: Lease, why: str) -> None:
        """Have a lease end. May be called from any thread."""
        self._failed.put((lease, why))
        os.write(self._waker, b"!")  # after the put: the agent's thread looks into the queue as it wakes

    def _end_failed(self) -> None:
        """End the leases that threads have reported; called as the pipe that they write into is readable."""
        os.read(self._woken, 4096)
        while not self._failed.empty():
            lease, why = self._failed.get()
            if self._leases.get(lease.secret) is lease:  # it may have ended meanwhile, for another reason
                self._end(lease, why)

    def _end(self, lease: Lease, why: str) -> None:
        """End a lease with all processes that were started under it, and tell its head why."""
        del self._leases[lease.secret]
        log.info("a lease has ended: %s", why)
        lease.end()
        self._ended.append(lease)
        self._bid_farewell(lease.head, lease.secret, why)

    def _bid_farewell(self, head: Outbox, secret: str, why: str) -> None:
        """Tell a head that it has no lease; its connection closes once that has left, ``FAREWELL_S`` later at most."""
        head.send(messages.encode(messages.LeaseEnded(cause=cut(why)), secret))
        self._farewells.append((head, time.monotonic() + FAREWELL_S))

    # ------------------------------------------------------------------------------------------------- what heads say

    def _receive(self, frames: Sequence[Frame]) -> None:
        """Obey a message, or refuse it; whatever is wrong with it ends its own lease and no other."""
        lease = None
        try:
            secret, raw = messages.lease_of(frames)
            # Compared in constant time, so that answers do not betray how much of a guessed secret is right.
            lease = next((one for one in self._leases.values() if messages.same(one.secret, secret)), None)
            message = messages.decode(raw, frames[1:])
            if lease is not None:
                lease.silent = 0.0
                self._obey(lease, message, frames[1:])
            elif isinstance(message, messages.Attach):
                self._attach(secret, message)
            else:
                raise ForeignFrame("it is of a lease that has ended, or never was")
        except (ConfigError, ForeignFrame, MalformedMessage) as error:
            self._refuse(lease, str(error))
        except Exception as error:
            log.exception("a message could not be taken in")
            self._refuse(lease, f"{type(error).__name__}: {error}")

    def _refuse(self, lease: Lease | None, why: str) -> None:
        """Log why a message is refused, and end the lease under which it was sent."""
        self._refusals.note(why)
        if lease is not None and lease.secret in self._leases:
            self._end(lease, f"refused a message: {why}")

    def _obey(self, lease: Lease, message: messages.Message, contents: Sequence[Frame]) -> None:
        """Obey a message under a lease: beats and farewells here, everything else on the lease's thread."""
        if isinstance(message, messages.Beat):
            now = time.monotonic()  # by this thread, at once: the head estimates the clocks' offset by the answer
            lease.tell(messages.BeatAnswer(sent=message.sent, received=now, answered=time.monotonic()))
        elif isinstance(message, messages.Detach):
            self._end(lease, "its head has left")
        else:
            lease.put(message, contents)

    def _report_ends(self) -> None:
        """Tell heads which stages have ended. Lines are short enough for writes to be atomic, so each is whole."""
        for line in os.read(self._ends, 65536).splitlines():
            # The pipe says whose process has ended by name alone: the lease that started it knows it.
            told = json.loads(line)
            for lease in list(self._leases.values()):
                try:
                    lease.note_end(told["process"], told["cause"])
                except MalformedMessage as error:
                    self._end(lease, str(error))


# -------------------------------------------------------------------------------------------------------------- joining
# Lets a worker come to a head by itself, so that only the head's address has to be known.

AGAIN_S: Final = 3.0
"""Seconds between two announcements: a head that was away, or starts later, gets the next one."""


class Joining:
    """A thread that tells the head at ``door`` (HOST:PORT), again and again, that ``host`` (HOST:PORT) listens.

    Raises FieldError for an invalid address. ``close`` ends the thread.
    """

    def __init__(self, door: str, host: str, security: LinkSecurity | None, private_network: bool) -> None:
        self._door = door
        self._host = host
        _, self._address = name_and_address(door, "join")
        self._sockets = Sockets(security, private_network)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="penstock joining", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        """Announce the host every ``AGAIN_S`` seconds; the log says when the result changes."""
        fault = None
        while not self._closing.is_set():
            outbox = self._sockets.connect(self._address, HEAD_DOOR)
            outbox.send(encode(Join(host=self._host), HEAD_DOOR))
            self._closing.wait(AGAIN_S)
            if outbox.fault != fault:
                fault = outbox.fault
                log.info("%s", f"no head at {self._door} yet: {fault}" if fault else f"has come to {self._door}")
            self._sockets.disconnect(outbox)

    def close(self) -> None:
        self._closing.set()
        self._thread.join()
        self._sockets.close()

    def __enter__(self) -> Joining:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


# -------------------------------------------------------------------------------------------------------------- systemd
# A systemd unit for a worker, which starts it with the host, and again whenever it ends.

UNIT: Final = """\
# Install as /etc/systemd/system/penstock-worker.service, then:
#   systemctl daemon-reload && systemctl enable --now penstock-worker
[Unit]
Description=Penstock worker
Wants=network-online.target
After=network-online.target
StartLimitIntervalSec=0

[Service]
ExecStart={command}
User={user}
Restart=always
RestartSec=3
KillMode=mixed
NoNewPrivileges=yes
ProtectSystem=full
PrivateTmp=yes

[Install]
WantedBy=multi-user.target
"""


def unit_of(options: Iterable[str]) -> str:
    """The unit file of a worker with these options, run by the current user with this Python."""
    command = [sys.executable, "-m", "penstock.cli", "worker", *options]
    return UNIT.format(command=" ".join(map(quoted, command)), user=getpass.getuser())


def quoted(word: str) -> str:
    """The word, escaped so that systemd takes every character of it literally."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{escaped}"' if escaped != word or any(character.isspace() for character in word) else word


# -------------------------------------------------------------------------------------------------------------- workers
# The command ``penstock worker``: runs a host agent until somebody ends it.


def run_worker(
    listen: str | None,
    head: str | None,
    keys: str | None,
    token: str | None,
    insecure: bool,
    cache: str | None,
    cache_gb: float,
    announce: bool,
) -> None:
    """Serve engines until Ctrl-C or SIGTERM. With ``head``, offer the host to the engine at that address.

    Raises ConfigError for an address on which it cannot listen, or which cannot be announced.
    """
    check(cache_gb >= 0, "cache_gb", cache_gb, "0 or above")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    if insecure and token is not None:
        raise FieldError("insecure", "takes no keys; remove it, or the token")
    if announce:
        require([LAN])
    listen = listen or default_address(head)
    address, place = own_place(listen)
    if announce and (place.on_this_host or ipaddress.ip_address(place.where[0]).is_unspecified):
        raise FieldError("announce", f"needs the address at which others reach this host (--listen), not {listen}")
    check_free(listen, place)
    if insecure:
        log.warning("insecure: whoever reaches %s can use this host, and the network sees what is said", listen)
    if token is not None:  # last of the checks, since a token works only once
        join(folder_of(keys), token, own_name())
    security = security_for(keys, insecure)
    kept = WeightCache(cache_for(cache), 1e9 * cache_gb)
    try:
        agent = HostAgent(address, security, insecure, kept)
    except OSError as error:
        raise not_own(listen, error) from error
    signal.signal(signal.SIGTERM, lambda *_: agent.stop())
    signal.signal(signal.SIGINT, lambda *_: agent.stop())
    with agent, ExitStack() as coming:
        name = agent.address.removeprefix("tcp://")
        log.info("listening at %s", name)
        if head is not None:
            coming.enter_context(Joining(head, name, security, insecure))
        if announce:
            from penstock.hosts.listing import Announcement

            coming.enter_context(Announcement(name))
        agent.serve()


def own_place(listen: str) -> tuple[str, Place]:
    """The address in numbers, and as a socket needs it. Raises FieldError for an unknown one."""
    try:
        _, address = name_and_address(listen, "listen", least_port=0)
    except FieldError:
        raise
    except ConfigError as error:
        raise not_own(listen, OSError("there is no such address")) from error
    return address, place_of(address)


def check_free(listen: str, place: Place) -> None:
    """Raise FieldError for an address that is not this host's, or is taken."""
    try:
        listener_at(place).close()
    except OSError as error:
        raise not_own(listen, error) from error


def not_own(listen: str, error: OSError) -> FieldError:
    """The error for an address on which this host cannot listen."""
    reason = error.strerror or error
    return FieldError("listen", f"is {listen!r}: {reason}; it has to be a free ADDRESS:PORT of this host")


def default_address(head: str | None) -> str:
    """The default address of a worker: on loopback or, if it joins a head, where that head reaches it."""
    own = "127.0.0.1" if head is None else address_toward(head, "join")
    return f"{own}:{DEFAULT_PORT}"


def print_unit(options: Mapping[str, object]) -> None:
    """Print a systemd unit for a worker with these options, by their fields' names. Raises FieldError for a token."""
    if options["token"] is not None:
        raise FieldError("token", "works once: start the worker with it by hand, then install the unit without it")
    words = []
    for name, value in options.items():
        if value is not None and value is not False:
            words += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    print(unit_of(words), end="")
