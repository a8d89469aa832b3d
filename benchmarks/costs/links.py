"""The time of a message between processes: our framing, plain and with TLS, and ZeroMQ, plain and with CURVE.

    python -m benchmarks.costs.links        # the rows for ZeroMQ need `pip install pyzmq`

Each kind of link has a sender and a receiver, on loopback and in two network namespaces joined by a virtual Ethernet
(which needs root). A message is a header of 200 bytes and, except for the smallest size, a batch's hidden states. A
message alone leaves once the one before has arrived; both processes read one monotonic clock. In a row, eight messages
are under way. Kinds take turns, so that disturbances meet all of them.
"""

from __future__ import annotations

import ctypes
import os
import signal
import struct
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any, Final, Protocol

from benchmarks.shared.benchmark import show
from benchmarks.shared.certificates import only_host
from penstock.messages import Frame
from penstock.transport.addresses import LinkSecurity, place_of
from penstock.transport.inbox import Inbox
from penstock.transport.outbox import Outbox

SIZES: Final = (0, 1 << 16, 1 << 18, 1 << 20, 1 << 22)
"""Bytes of hidden states."""
HEADER: Final = 200
ROUNDS: Final = 9
BYTES_A_ROUND: Final = 24 << 20
MOST_A_ROUND: Final = 100
"""Most messages of one size and kind per round."""
TOGETHER: Final = 8
SESSION: Final = "links"
NAMESPACES: Final = {"penstock-a": "10.213.7.1", "penstock-b": "10.213.7.2"}
CLONE_NEWNET: Final = 0x40000000
STAMP: Final = struct.Struct("<d")

Receive = Callable[[], Sequence[Frame]]
Send = Callable[[bytes, bytes], None]


class Kind(Protocol):
    """The two ends of a kind of link. The objects that they make live as long as their process."""

    def listen(self, host: str) -> tuple[str, Receive]: ...

    def connect(self, address: str) -> Send: ...


class Framed:
    """Our own framing: an inbox and an outbox."""

    def __init__(self, folder: Path, security: LinkSecurity | None = None, ipc: bool = False) -> None:
        self._folder, self._security, self._ipc = folder, security, ipc

    def listen(self, host: str) -> tuple[str, Receive]:
        place = place_of(f"ipc://{self._folder}/{os.getpid()}" if self._ipc else f"tcp://{host}:*")
        inbox = Inbox(place, None if self._security is None else self._security.for_listening())
        inbox.admit(SESSION)
        return inbox.address, partial(next, messages_of(inbox))

    def connect(self, address: str) -> Send:
        context = None if self._security is None else self._security.for_connecting()
        return Outbox(place_of(address), SESSION, context).send


def messages_of(inbox: Inbox) -> Iterator[Sequence[Frame]]:
    while True:
        inbox.wait(None)
        yield from inbox.take()


class ZeroMQ:
    """A PUSH and a PULL socket without limits on waiting messages; with CURVE if there are keys."""

    def __init__(self, curve: bool) -> None:
        import zmq

        self._zmq = zmq
        self._keys = [zmq.curve_keypair(), zmq.curve_keypair()] if curve else []

    def listen(self, host: str) -> tuple[str, Receive]:
        socket = self._zmq.Context.instance().socket(self._zmq.PULL)
        socket.setsockopt(self._zmq.RCVHWM, 0)
        if self._keys:
            socket.curve_server, (socket.curve_publickey, socket.curve_secretkey) = True, self._keys[0]
        socket.bind(f"tcp://{host}:*")
        return socket.getsockopt_string(self._zmq.LAST_ENDPOINT), socket.recv_multipart

    def connect(self, address: str) -> Send:
        socket = self._zmq.Context.instance().socket(self._zmq.PUSH)
        socket.setsockopt(self._zmq.SNDHWM, 0)
        if self._keys:
            socket.curve_serverkey, (socket.curve_publickey, socket.curve_secretkey) = self._keys[0][0], self._keys[1]
        socket.connect(address)
        return lambda *frames: socket.send_multipart(frames)


class Link:
    """Two processes and the link between them. ``enter`` moves a process to its place before it opens anything."""

    def __init__(self, kind: Kind, host: str, enter: Sequence[Callable[[], None]]) -> None:
        arrivals, arrived = Pipe()
        self._pids = []
        addresses, address = Pipe()
        self._orders, orders = Pipe()
        self._pids.append(forked(enter[1], lambda: receive(kind, host, address, arrived)))
        where = addresses.recv()
        self._pids.append(forked(enter[0], lambda: send(kind, where, arrivals, orders)))

    def measured(self, size: int, count: int, together: int) -> tuple[list[float], float]:
        """Seconds of each message, and of all of them."""
        self._orders.send((size, count, together))
        trips, seconds = self._orders.recv()
        return trips, seconds

    def close(self) -> None:
        for pid in self._pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def forked(enter: Callable[[], None], work: Callable[[], None]) -> int:
    if pid := os.fork():
        return pid
    try:
        enter()
        work()
    finally:
        os._exit(1)


def receive(kind: Kind, host: str, address: Connection, arrived: Connection) -> None:
    where, receive_one = kind.listen(host)
    address.send(where)
    while True:
        header = receive_one()[0]
        now = time.monotonic()
        arrived.send_bytes(STAMP.pack(now - STAMP.unpack_from(header)[0]))


def send(kind: Kind, where: str, arrivals: Connection, orders: Connection) -> None:
    send_one = kind.connect(where)
    while True:
        size, count, together = orders.recv()
        payload, began, sent = bytes(size), time.monotonic(), 0
        trips: list[float] = []
        while len(trips) < count:
            while sent < min(count, len(trips) + together):
                send_one(STAMP.pack(time.monotonic()) + bytes(HEADER - STAMP.size), payload)
                sent += 1
            trips.append(STAMP.unpack(arrivals.recv_bytes())[0])
        orders.send((trips, time.monotonic() - began))


# --------------------------------------------------------------------------------------------------------- where


@contextmanager
def loopback() -> Iterator[tuple[str, list[Callable[[], None]]]]:
    yield "127.0.0.1", [lambda: None] * 2


@contextmanager
def namespaces() -> Iterator[tuple[str, list[Callable[[], None]]]]:
    """Two network namespaces with a link between them. Raises CalledProcessError where none may be made."""
    try:
        for name in NAMESPACES:
            run("ip", "netns", "add", name)
        one, other = NAMESPACES
        run("ip", "link", "add", "eth", "netns", one, "type", "veth", "peer", "name", "eth", "netns", other)
        for name, address in NAMESPACES.items():
            run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", "eth")
            run("ip", "-n", name, "link", "set", "eth", "up")
        yield NAMESPACES[other], [partial(enter_namespace, name) for name in NAMESPACES]
    finally:
        for name in NAMESPACES:
            subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL, check=False)


def run(*command: str) -> None:
    subprocess.run(command, check=True)


def enter_namespace(name: str) -> None:
    with open(f"/var/run/netns/{name}") as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter {name}")


PLACES: Final = {"loopback": loopback, "namespaces": namespaces}

# ------------------------------------------------------------------------------------------------------- measuring


def measured() -> list[dict[str, Any]]:
    """Median milliseconds of a message alone, and median MB/s of messages in a row, by place, kind and size."""
    return [row for place in PLACES for row in measured_at(place)]


def measured_at(place: str) -> list[dict[str, Any]]:
    trips: dict[tuple[str, int], list[float]] = defaultdict(list)
    rates: dict[tuple[str, int], list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder, PLACES[place]() as (host, enter), ExitStack() as stack:
        links = {}
        for name, kind in kinds(Path(folder), place).items():
            links[name] = Link(kind, host, enter)
            stack.callback(links[name].close)
        for turn in range(ROUNDS):
            for size in SIZES:
                count = max(4, min(MOST_A_ROUND, BYTES_A_ROUND // (size + HEADER)))
                for name, link in links.items():
                    link.measured(size, 2, 1)
                    alone, _ = link.measured(size, count, 1)
                    _, seconds = link.measured(size, count, TOGETHER)
                    if turn:  # the first round warms up
                        trips[name, size] += alone
                        rates[name, size].append(count * (size + HEADER) / seconds)
    return [
        {"place": place, "kind": name, "size": size, "ms": 1e3 * median(found), "mb_s": median(rates[name, size]) / 1e6}
        for (name, size), found in trips.items()
    ]


def kinds(folder: Path, place: str) -> dict[str, Kind]:
    security = only_host(folder)
    found: dict[str, Kind] = {"ipc": Framed(folder, ipc=True)} if place == "loopback" else {}
    found |= {"tcp": Framed(folder), "tls": Framed(folder, security)}
    try:
        return found | {"zeromq": ZeroMQ(curve=False), "curve": ZeroMQ(curve=True)}
    except ImportError:
        print("pyzmq is not installed: without the rows for ZeroMQ")
        return found


if __name__ == "__main__":
    show(measured())
