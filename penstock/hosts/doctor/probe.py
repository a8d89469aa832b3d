"""A probe: a process on a host that measures devices and links as stages would find them.

    head  --MeasureLink-->  probe a  --Burden, of growing size-->  probe b
                                     <-Taken----------------------
          <-LinkMeasured--

Between two probes messages travel as between two stages. Only the sender's clock is read. The rate follows from the
extra time of a message of twice the size, so that neither the latency nor the other end's clock matters.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Final

import msgspec

from penstock.core import ConfigError
from penstock.hosts.control import encode
from penstock.hosts.cores import usable_cores
from penstock.hosts.doctor.messages import (
    Burden,
    DevicesMeasured,
    LinkMeasured,
    MeasureDevices,
    MeasureLink,
    ProbeMessage,
    ProbeReady,
    Taken,
    message_of,
)
from penstock.hosts.doctor.rates import measured
from penstock.messages import ForeignFrame, MalformedMessage
from penstock.transport.outbox import Outbox
from penstock.transport.security import LinkSecurity
from penstock.transport.sockets import Sockets

SMALL: Final = 200
"""Bytes of a message that measures latency: about as many as one token's header."""
TRIPS: Final = 20
LEAST, MOST = 1 << 14, 1 << 25
"""Bytes of the smallest and the largest message that measure the rate."""
LONG_ENOUGH_S: Final = 0.2
"""Seconds of a round trip from which on the message's size is not doubled any more."""
REPEATS: Final = 4
"""Round trips of each large message; the quickest counts, since nothing else on the hosts has held it up."""
ANSWER_S: Final = 20.0
"""Seconds within which the other end has to answer."""


class ProbeSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A probe's settings: ``name`` is the head's name for it, ``bind`` its address, ``head`` the head's inbox."""

    name: str
    session: str
    bind: str
    head: str
    security: LinkSecurity | None = None
    private_network: bool = False


class Probe:
    """Measures what it is told to, and answers other probes, until the process ends."""

    def __init__(self, spec: ProbeSpec) -> None:
        self._spec = spec
        self._sockets = Sockets(spec.security, spec.private_network)
        self._inbox = self._sockets.inbox(spec.bind)
        self._inbox.admit(spec.session)
        self._outboxes: dict[str, Outbox] = {}
        self._sent = 0

    def run(self) -> None:
        self._tell(self._spec.head, ProbeReady(name=self._spec.name, address=self._inbox.address))
        for message in self._come(None):
            if isinstance(message, MeasureDevices):
                self._tell(self._spec.head, self._devices(message.devices))
            elif isinstance(message, MeasureLink):
                self._tell(self._spec.head, self._link(message.address))

    def _devices(self, names: Sequence[str]) -> DevicesMeasured:
        try:
            rates = [measured(name, usable_cores()) for name in names]
        except Exception as error:  # torch raises many kinds
            return DevicesMeasured(name=self._spec.name, rates=[], problem=f"it could not be measured: {error}")
        return DevicesMeasured(name=self._spec.name, rates=rates)

    def _link(self, address: str) -> LinkMeasured:
        try:
            self._trip(address, SMALL)  # does not count: it opens the connection
            round_trip = median(self._trip(address, SMALL) for _ in range(TRIPS))
            return LinkMeasured(name=self._spec.name, round_trip_s=round_trip, bytes_per_s=self._rate(address))
        except (TimeoutError, ConfigError) as error:
            return LinkMeasured(name=self._spec.name, problem=str(error))

    def _rate(self, address: str) -> float:
        """Bytes per second, measured with messages so large that they take a while."""
        size = LEAST
        while self._trip(address, size) < LONG_ENOUGH_S and size < MOST:
            size *= 2
        # The difference of the two times leaves out the latency.
        whole, half = (min(self._trip(address, one) for _ in range(REPEATS)) for one in (size, size // 2))
        return size / 2 / (whole - half) if whole > half else size / whole

    def _trip(self, address: str, size: int) -> float:
        """Seconds until the other end has answered a message of ``size`` bytes. Raises TimeoutError."""
        self._sent += 1
        begin = time.monotonic()
        self._tell(address, Burden(number=self._sent, back=self._inbox.address), bytes(size))
        for message in self._come(begin + ANSWER_S):
            if isinstance(message, Taken) and message.number == self._sent:
                return time.monotonic() - begin
        fault = self._outboxes[address].fault
        raise TimeoutError(fault or f"no answer within {ANSWER_S:.0f} s")

    def _come(self, until: float | None) -> Iterator[ProbeMessage]:
        """Messages as they come, until that time (None: without end); those of other probes are answered here."""
        while until is None or time.monotonic() < until:
            self._inbox.wait(until)
            for frames in self._inbox.take():
                try:
                    message = message_of(frames, self._spec.session)
                    if isinstance(message, Burden):
                        self._tell(message.back, Taken(number=message.number))
                        continue
                except (ForeignFrame, MalformedMessage, ConfigError):
                    continue
                yield message

    def _tell(self, address: str, message: ProbeMessage, content: bytes | None = None) -> None:
        if address not in self._outboxes:
            self._outboxes[address] = self._sockets.connect(address, self._spec.session)
        frames = [encode(message, self._spec.session)]
        self._outboxes[address].send(*frames, *([] if content is None else [content]))


def main() -> None:
    """Run the probe's process. Standard input gives its spec as one line, and ends when its starter ends."""
    spec = msgspec.json.decode(sys.stdin.readline(), type=ProbeSpec)
    threading.Thread(target=leave_with_stdin, daemon=True).start()
    Probe(spec).run()


def leave_with_stdin() -> None:
    sys.stdin.read()
    os._exit(0)
