"""Probes of devices and links for ``penstock doctor``: the process, its messages, and the report."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Final

import msgspec

from penstock.core import ConfigError
from penstock.hosts.facts import HostFacts, usable_cores
from penstock.hosts.messages import encode, lease_of
from penstock.hosts.remote import ClockOffset
from penstock.messages import UNDECODABLE, Address, ForeignFrame, Frame, Index, Label, MalformedMessage, Seconds, Words
from penstock.transport.addresses import LinkSecurity
from penstock.transport.outbox import Outbox, Sockets

# --------------------------------------------------------------------------------------------------------------- report
# The report of ``penstock doctor``, as its ``--json`` prints it. ``read_report`` reads it, for the planner for one.


class DeviceRates(msgspec.Struct, frozen=True, kw_only=True):
    """A device's measured rates, named as in a cluster file, with its ``threads`` if it is a "cpu".

    The matrices of one decoder layer were multiplied (``measured``): ``weight_bandwidth_gb_s`` is the rate at which one
    row reads them, in 1e9 bytes/s, ``compute_tflops`` that of many rows, in 1e12 operations/s, and ``rows_per_second``
    is by the number of rows in a batch.
    """

    device: Label
    threads: Index
    dtype: Label
    weight_bandwidth_gb_s: Seconds
    compute_tflops: Seconds
    rows_per_second: Annotated[dict[Index, Seconds], msgspec.Meta(max_length=256)]


class ExaminedHost(msgspec.Struct, frozen=True, kw_only=True):
    """A host by its name, with its facts and measured rates, or else the ``problem``.

    ``clock``: seconds to add to a moment of this host's monotonic clock for the other's, and the largest error of that.
    """

    host: str
    problem: str = ""
    facts: HostFacts | None = None
    clock: ClockOffset | None = None
    rates: list[DeviceRates] = []


class LinkRates(msgspec.Struct, frozen=True, kw_only=True):
    """The link from one host to another, measured as stages' messages travel: with TLS, if there are keys.

    ``bandwidth_gbit_s`` is in 1e9 bits/s of payload. ``latency_ms`` is half the round trip of a small message. Both are
    None if there is a ``problem``.
    """

    source: str = msgspec.field(name="from")
    to: str
    latency_ms: float | None = None
    bandwidth_gbit_s: float | None = None
    problem: str = ""


class ExaminedRank(msgspec.Struct, frozen=True, kw_only=True):
    """A rank of a tensor parallel stage: its host, and its threads there; None if that host was not measured."""

    host: str
    threads: int | None = None
    problem: str = ""


class GroupTime(msgspec.Struct, frozen=True, kw_only=True):
    """Predicted milliseconds for a batch of ``rows``: by a group, its exchange, and by its fastest host alone."""

    rows: int
    group_ms: float
    exchange_ms: float
    alone_ms: float
    alone_on: str


class ExaminedGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor parallel stage of a cluster file, by its number, with its ranks in order and their slowest link.

    ``latency_ms`` and ``bandwidth_gbit_s`` are the worst between any two of its hosts, None where it has one host or
    none were measured. ``times`` is empty where something was not measured, or no link is between the ranks.
    """

    stage: int
    ranks: list[ExaminedRank]
    latency_ms: float | None = None
    bandwidth_gbit_s: float | None = None
    times: list[GroupTime] = []


class DoctorReport(msgspec.Struct, frozen=True, kw_only=True):
    """A whole report. ``hosts`` begin with "localhost". Two hosts that answer have two links, one in each direction."""

    version: int = 1
    hosts: list[ExaminedHost]
    links: list[LinkRates]
    groups: list[ExaminedGroup] = []
    advice: list[str] = []


def read_report(path: Path) -> DoctorReport:
    """Read a file with the output of ``penstock doctor --json``. Raises ConfigError for anything else."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=DoctorReport)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is not what `penstock doctor --json` prints: {error}") from error


# ------------------------------------------------------------------------------------------------------------- messages
# The messages between the head and the probes of a doctor. A header carries the secret of their session.

FEW: Final = msgspec.Meta(max_length=256)
"""Bound on the devices of a host, as ``facts.MOST_DEVICES``."""
Devices = Annotated[list[Label], FEW]


class ProbeReady(msgspec.Struct, tag="probe_ready", kw_only=True, frozen=True):
    """The probe called ``name`` listens at ``address``."""

    name: Label
    address: Address


class MeasureDevices(msgspec.Struct, tag="measure_devices", kw_only=True, frozen=True):
    """Measure these devices of the probe's host, by torch's names."""

    devices: Devices


class DevicesMeasured(msgspec.Struct, tag="devices_measured", kw_only=True, frozen=True):
    """A host's rates, or the ``problem`` with measuring them."""

    name: Label
    rates: Annotated[list[DeviceRates], FEW]
    problem: Words = ""


class MeasureLink(msgspec.Struct, tag="measure_link", kw_only=True, frozen=True):
    """Measure the link from the probe that gets this to the one at ``address``."""

    address: Address


class LinkMeasured(msgspec.Struct, tag="link_measured", kw_only=True, frozen=True):
    """A link's figures: seconds of a round trip, and bytes per second; or the ``problem`` with it."""

    name: Label
    round_trip_s: Seconds = 0.0
    bytes_per_s: Seconds = 0.0
    problem: Words = ""


class Burden(msgspec.Struct, tag="burden", kw_only=True, frozen=True):
    """A message whose second frame has the size to be measured. It is answered to ``back`` once all of it is there."""

    number: Index
    back: Address


class Taken(msgspec.Struct, tag="taken", kw_only=True, frozen=True):
    """The answer to the ``Burden`` of that number."""

    number: Index


ProbeMessage = ProbeReady | MeasureDevices | DevicesMeasured | MeasureLink | LinkMeasured | Burden | Taken

_decoder = msgspec.msgpack.Decoder(ProbeMessage)


def message_of(frames: Sequence[Frame], session: str) -> ProbeMessage:
    """Decode a message. Raises ForeignFrame for one of another session, and MalformedMessage."""
    found, raw = lease_of(frames)
    if found != session:
        raise ForeignFrame("it is of another session")
    try:
        message: ProbeMessage = _decoder.decode(raw)
    except UNDECODABLE as error:
        raise MalformedMessage(f"message does not decode: {error}") from error
    return message


# ---------------------------------------------------------------------------------------------------------------- rates
# Measures how fast a device is: multiplies the matrices of one decoder layer with one row and with many.

HIDDEN, INNER = 2048, 5632
"""The sizes of TinyLlama-1.1B's layers."""
SHAPES: Final = ((HIDDEN, HIDDEN),) * 4 + ((INNER, HIDDEN),) * 2 + ((HIDDEN, INNER),)
"""[out, in] of queries, keys, values, output; gate, up, down. They take 0.2 GB in float32, more than a cache holds."""
NUMBERS: Final = sum(rows * columns for rows, columns in SHAPES)
"""Numbers in these matrices."""
BYTES: Final = 4 * NUMBERS
"""Bytes of them in float32."""
NEEDED: Final = 2 * BYTES
"""Bytes of memory that have to be free for a measurement. The other half is for torch and for the rows."""
ROWS: Final = (1, 16, 64, 128)
"""Rows of the batches that are measured. With one row the time goes into reading weights, with 128 into operations."""
TIMES: Final = 3
"""Measurements of one size, of which the median counts. The median of three ignores one that was disturbed."""


def measured(device: str, threads: int) -> DeviceRates:
    """A device's rates in float32, the engine's default, with ``threads`` threads."""
    import torch

    torch.set_num_threads(threads)
    where = torch.device(device)
    with torch.inference_mode():
        weights = [torch.full(shape, 0.01, device=where) for shape in SHAPES]
        seconds = {rows: seconds_of(weights, rows) for rows in ROWS}
    # With one row the time goes into reading the weights, with many into the operations.
    return DeviceRates(
        device=device,
        threads=threads,
        dtype="float32",
        weight_bandwidth_gb_s=BYTES / seconds[1] / 1e9,
        compute_tflops=2 * NUMBERS * ROWS[-1] / seconds[ROWS[-1]] / 1e12,
        rows_per_second={rows: rows / taken for rows, taken in seconds.items()},
    )


def seconds_of(weights: list[Any], rows: int) -> float:
    """Seconds for a batch of ``rows`` rows: the median of ``TIMES``, after one that warms up."""
    import torch

    inputs = {size: torch.ones(rows, size, device=weights[0].device) for size in (HIDDEN, INNER)}
    taken = []
    for _ in range(1 + TIMES):
        begin = time.perf_counter()
        for matrix in weights:
            inputs[matrix.shape[1]] @ matrix.T
        if weights[0].is_cuda:  # the products above have only been queued
            torch.cuda.synchronize(weights[0].device)
        taken.append(time.perf_counter() - begin)
    return median(taken[1:])


# ---------------------------------------------------------------------------------------------------------------- probe
# A probe: a process on a host that measures devices and links as stages would find them.
#
#     head  --MeasureLink-->  probe a  --Burden, of growing size-->  probe b
#                                      <-Taken----------------------
#           <-LinkMeasured--
#
# Between two probes messages travel as between two stages. Only the sender's clock is read. The rate follows from the
# extra time of a message of twice the size, so that neither the latency nor the other end's clock matters.

SMALL: Final = 200
"""Bytes of a message that measures latency: about as many as one token's header."""
TRIPS: Final = 20
"""Round trips of a small message, of which the median counts. A few late ones do not change it."""
LEAST, MOST = 1 << 14, 1 << 25
"""Bytes of the smallest and the largest message that measure the rate. The size is doubled until a round trip takes
``LONG_ENOUGH_S``."""
LONG_ENOUGH_S: Final = 0.2
"""Seconds of a round trip from which on the message's size is not doubled any more. The latency and the clocks' steps
are small beside it."""
REPEATS: Final = 4
"""Round trips of each large message; the quickest counts, since nothing else on the hosts has held it up."""
ANSWER_S: Final = 20.0
"""Seconds within which the other end has to answer. 32 MiB take 13 s at 20 Mbit/s."""


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
        """Measure and answer until the process ends."""
        self._tell(self._spec.head, ProbeReady(name=self._spec.name, address=self._inbox.address))
        for message in self._come(None):
            if isinstance(message, MeasureDevices):
                self._tell(self._spec.head, self._devices(message.devices))
            elif isinstance(message, MeasureLink):
                self._tell(self._spec.head, self._link(message.address))

    def _devices(self, names: Sequence[str]) -> DevicesMeasured:
        """The rates of these devices; the problem if torch cannot measure one."""
        try:
            rates = [measured(name, usable_cores()) for name in names]
        except Exception as error:  # torch raises many kinds
            return DevicesMeasured(name=self._spec.name, rates=[], problem=f"it could not be measured: {error}")
        return DevicesMeasured(name=self._spec.name, rates=rates)

    def _link(self, address: str) -> LinkMeasured:
        """The figures of the link to the probe at ``address``; the problem if it does not answer."""
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
        """Send a message, with its second frame if it has one, over a connection that stays open."""
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
    """End the process as standard input ends: its starter is gone, however it ended."""
    sys.stdin.read()
    os._exit(0)
