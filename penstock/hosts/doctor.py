"""Examines hosts and links for ``penstock doctor``, by a probe on each host.

A probe multiplies matrices of its own, whereas ``penstock profile`` times a model's layers: the doctor examines hosts
that hold no model yet, and from its rates ``penstock plan --doctor`` prices any model.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from itertools import permutations
from typing import Final, TypeVar

import msgspec

from penstock.core import ConfigError
from penstock.hosts.facts import HostFacts, own_facts
from penstock.hosts.fleet import Fleet
from penstock.hosts.keys import security_for
from penstock.hosts.messages import encode
from penstock.hosts.placement import HERE
from penstock.hosts.probe import (
    NEEDED,
    DevicesMeasured,
    DoctorReport,
    ExaminedHost,
    LinkMeasured,
    LinkRates,
    MeasureDevices,
    MeasureLink,
    ProbeMessage,
    ProbeReady,
    ProbeSpec,
    message_of,
)
from penstock.messages import ForeignFrame, MalformedMessage
from penstock.pipeline.forkserver import GPUS
from penstock.transport.addresses import LinkSecurity
from penstock.transport.outbox import Outbox, Sockets

# -------------------------------------------------------------------------------------------------------- probe process
# A probe's process, for the process that starts it. It ends with that process, however that ends.


class ProbeProcess:
    """A probe's process, from its start until ``end``."""

    def __init__(self, spec: ProbeSpec) -> None:
        # Modules are found where this process finds them, neither more (the working directory) nor less.
        code = f"import sys; sys.path[:] = {sys.path!r}; from penstock.hosts.probe import main; main()"
        self._process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env={**GPUS, **os.environ},  # it measures the GPUs by the numbers that the host's facts have for them
            start_new_session=True,  # so that Ctrl-C in the terminal reaches only the doctor, which ends the probe
        )
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended already: the head misses its answer
            self._process.stdin.write(msgspec.json.encode(spec) + b"\n")
            self._process.stdin.flush()

    def end(self) -> None:
        """Kill the process and wait for it. Safe to call twice."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()


# -------------------------------------------------------------------------------------------------------------- examine
# The doctor: has every host measure itself and its links to all others, one measurement at a time.

PROBE_S: Final = 60.0
"""Seconds within which a probe has to have started."""
MEASURE_S: Final = 240.0
"""Seconds that one measurement may take: torch is imported before the first."""
LOOK_EVERY: Final = 1.0
"""Seconds between two checks that a host which is to answer is still there."""

Kind = TypeVar("Kind", ProbeReady, DevicesMeasured, LinkMeasured)
OnStep = Callable[[int, int], None]
"""Called with the number of measurements that are done, and of all."""


def examine(names: Sequence[str], keys: str | None, insecure: bool, on_step: OnStep) -> DoctorReport:
    """The report on this host and the others in ``names``, without advice. An unusable host has a ``problem``."""
    security = security_for(keys, insecure)
    found: dict[str, ExaminedHost] = {HERE: ExaminedHost(host=HERE, facts=own_facts(""))}
    with ExitStack() as open_fleets, ThreadPoolExecutor(len(names) or 1) as apart:
        fleets: dict[str, Fleet] = {}
        for name, answer in zip(names, apart.map(partial(attached, security, insecure), names), strict=True):
            if isinstance(answer, Fleet):
                fleets[name] = answer
                open_fleets.callback(answer.close)
            else:
                found[name] = ExaminedHost(host=name, problem=answer)
        with Examination(fleets, security, insecure) as examination:
            steps = len(examination.present) ** 2
            hosts = []
            for name in (HERE, *names):
                hosts.append(found[name] if name in found and name != HERE else examination.host(name))
                on_step(len(hosts), steps)
            links = []
            for pair in permutations(examination.present, 2):
                links.append(examination.link(*pair))
                on_step(len(examination.present) + len(links), steps)
            return DoctorReport(hosts=hosts, links=links)


def examine_links(
    names: Sequence[str],
    security: LinkSecurity | None,
    private_network: bool,
    on_step: OnStep,
    pairs: Sequence[tuple[str, str]] | None = None,
) -> list[LinkRates]:
    """Measure the links among this host and the others, in each direction, or those in ``pairs`` alone.

    Raises ConfigError for a host that cannot be used.
    """
    with ExitStack() as open_fleets:
        fleets: dict[str, Fleet] = {}
        for name in names:
            fleets[name] = Fleet([name], security, private_network=private_network)
            open_fleets.callback(fleets[name].close)
        with Examination(fleets, security, private_network) as examination:
            wanted = list(permutations((HERE, *names), 2)) if pairs is None else pairs
            links = []
            for pair in wanted:
                links.append(examination.link(*pair))
                on_step(len(links), len(wanted))
            return links


def attached(security: LinkSecurity | None, insecure: bool, name: str) -> Fleet | str:
    """A fleet of the host ``name`` alone, or the reason why there is none."""
    try:
        return Fleet([name], security, private_network=insecure)
    except ConfigError as error:
        return str(error)


class Examination:
    """A probe on this host, and one on each of the others; ``fleets`` has a fleet for each of these, by name."""

    def __init__(self, fleets: dict[str, Fleet], security: LinkSecurity | None, private_network: bool) -> None:
        self._fleets = fleets
        self._session = secrets.token_hex(16)
        here = next((fleet.reached_at for fleet in fleets.values()), "127.0.0.1")
        self._sockets = Sockets(security, private_network)
        self._inbox = self._sockets.inbox(f"tcp://{here}:*")
        self._inbox.admit(self._session)
        spec = ProbeSpec(
            name=HERE,
            session=self._session,
            bind=f"tcp://{here}:*",
            head=self._inbox.address,
            security=security,
            private_network=private_network,
        )
        self._heard: dict[tuple[str, type], ProbeMessage] = {}
        """The first message of each kind from each host's probe that no call has taken yet."""
        self._addresses: dict[str, str] = {}
        self._outboxes: dict[str, Outbox] = {}
        self._faults: dict[str, str] = {}
        """The reason why a host's probe cannot be used, by the host's name."""
        self._names = {HERE, *fleets}
        self._own_probe = ProbeProcess(spec)
        try:
            for name, fleet in fleets.items():
                fleet.hosts[name].start_probe(self._session, self._inbox.address)
            for name in (HERE, *fleets):
                self._meet(name)
        except BaseException:
            self.__exit__()
            raise

    def _meet(self, name: str) -> None:
        """Wait for a host's probe and connect to it."""
        if (ready := self._answer(ProbeReady, name, PROBE_S)) is None:
            return
        try:
            self._outboxes[name] = self._sockets.connect(ready.address, self._session)
        except ConfigError as error:
            self._faults[name] = f"host {name}: its probe cannot be reached: {error}"
        else:
            self._addresses[name] = ready.address

    @property
    def present(self) -> list[str]:
        """The hosts whose probes have started."""
        return list(self._addresses)

    def host(self, name: str) -> ExaminedHost:
        facts = own_facts("") if name == HERE else self._fleets[name].hosts[name].facts
        clock = None if name == HERE else self._fleets[name].hosts[name].offsets.best
        if facts is None or name not in self._addresses:
            return ExaminedHost(host=name, problem=self._silence(name, PROBE_S), facts=facts, clock=clock)
        devices = [one.device for one in facts.devices if one.free is None or one.free >= NEEDED]
        self._tell(name, MeasureDevices(devices=devices))
        answer = self._answer(DevicesMeasured, name, MEASURE_S)
        problem = self._silence(name, MEASURE_S) if answer is None else answer.problem
        rates = [] if answer is None else answer.rates
        return ExaminedHost(host=name, problem=problem or too_full(name, facts), facts=facts, clock=clock, rates=rates)

    def link(self, source: str, to: str) -> LinkRates:
        if silent := [name for name in (source, to) if name not in self._addresses]:
            return LinkRates(source=source, to=to, problem=self._silence(silent[0], PROBE_S))
        self._tell(source, MeasureLink(address=self._addresses[to]))
        answer = self._answer(LinkMeasured, source, MEASURE_S)
        if answer is None or answer.problem:
            problem = self._silence(source, MEASURE_S) if answer is None else answer.problem
            return LinkRates(source=source, to=to, problem=problem)
        return LinkRates(
            source=source, to=to, latency_ms=1e3 * answer.round_trip_s / 2, bandwidth_gbit_s=8e-9 * answer.bytes_per_s
        )

    def _tell(self, name: str, message: ProbeMessage) -> None:
        self._outboxes[name].send(encode(message, self._session))

    def _answer(self, kind: type[Kind], name: str, seconds: float) -> Kind | None:
        """A message of this kind from a host's probe; None if none comes within ``seconds``, or the host is lost."""
        deadline = time.monotonic() + seconds
        while (now := time.monotonic()) < deadline and self._is_there(name):
            if (message := self._heard.pop((name, kind), None)) is not None:
                assert isinstance(message, kind)
                return message
            self._inbox.wait(min(deadline, now + LOOK_EVERY))
            self._take_in()
        return None

    def _take_in(self) -> None:
        for frames in self._inbox.take():
            with contextlib.suppress(ForeignFrame, MalformedMessage):
                message = message_of(frames, self._session)
                if isinstance(message, ProbeReady | DevicesMeasured | LinkMeasured) and message.name in self._names:
                    self._heard.setdefault((message.name, type(message)), message)

    def _is_there(self, name: str) -> bool:
        return name == HERE or self._fleets[name].hosts[name].alive

    def _silence(self, name: str, seconds: float) -> str:
        """The reason why a host has not answered."""
        if name in self._faults:
            return self._faults[name]
        if not self._is_there(name):
            return self._fleets[name].hosts[name].cause
        return f"host {name}: its probe has said nothing for {seconds:.0f} s"

    def __enter__(self) -> Examination:
        return self

    def __exit__(self, *raised: object) -> None:
        self._own_probe.end()
        self._inbox.close()
        self._sockets.close()


def too_full(name: str, facts: HostFacts) -> str:
    full = [one.device for one in facts.devices if one.free is not None and one.free < NEEDED]
    return f"host {name}: {', '.join(full)} has not {NEEDED / 1e9:.1f} GB free, and was not measured" if full else ""
