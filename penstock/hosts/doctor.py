"""Examines hosts, links and groups of ranks for ``penstock doctor``, by a probe on each host."""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import combinations, permutations
from typing import Final, TypeVar

import msgspec

from penstock.cluster import PRICES, Cluster
from penstock.cluster.spec import TENSORS, Device, Link, LinkBetween, Links, ModelPrice, Stage
from penstock.cluster.timing import GroupTiming, check_divisible, part_timing
from penstock.config import FieldError
from penstock.core import ConfigError
from penstock.hosts.facts import HostFacts, own_facts
from penstock.hosts.fleet import Fleet
from penstock.hosts.keys import security_for
from penstock.hosts.messages import encode
from penstock.hosts.placement import HERE, hosts_of_ranks, ranks_said
from penstock.hosts.probe import (
    NEEDED,
    DeviceRates,
    DevicesMeasured,
    DoctorReport,
    ExaminedGroup,
    ExaminedHost,
    ExaminedRank,
    GroupTime,
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

# --------------------------------------------------------------------------------------------------------------- groups
# The groups of ranks that ``penstock doctor`` examines: their links, and whether these make them slower than one host.
#
# The measured rates of hosts and links price the doctor's own example, TinyLlama-1.1B in float32, as the planner prices
# a tensor parallel stage (``cluster/timing.py``): the slowest rank's share of every layer, and the exchange over the
# slowest link between two ranks.

EXAMPLE: Final[ModelPrice] = replace(PRICES["tinyllama-1.1b-fp16"], bytes_per_parameter=4.0, activation_bytes=4.0)
"""The model whose layer's matrices the hosts have multiplied."""
EXAMPLE_NAME: Final = "TinyLlama-1.1B in float32"
"""The example's name for people."""
TIMED_ROWS: Final = (1, 64)
"""Rows of the batches that are predicted: a token of plain decoding, and a wide tree or many requests."""
WITHIN: Final = Link(bandwidth_gbit_s=1e6, latency_ms=0.0)
"""The link between ranks of one host, quicker than any network: a group over several hosts waits for the others."""
RANKS_ON: Final = "cpu"
"""The device of every rank: tensor parallel stages compute on processors."""


def groups_of(cluster: Cluster) -> dict[int, tuple[str, ...]]:
    """The hosts of the ranks of each tensor parallel stage of a cluster of real devices, by the stage's number."""
    hosts = hosts_of_ranks(None, cluster, len(cluster.stages))
    stages = enumerate(zip(cluster.stages, hosts, strict=True))
    return {i: tuple(host or HERE for host in group) for i, (stage, group) in stages if stage.tensor_parallel}


def examined_group(stage: int, hosts: Sequence[str], report: DoctorReport) -> ExaminedGroup:
    """The group of ranks on these ``hosts``, by a report on them; without times if one was not measured."""
    found = {one.host: one for one in report.hosts}
    there = Counter(hosts)
    rates = {host: cpu_of(found[host].rates) if host in found else None for host in there}
    ranks = [
        ExaminedRank(
            host=host,
            threads=None if (rate := rates[host]) is None else max(1, rate.threads // there[host]),
            problem=found[host].problem if host in found else "it was not examined",
        )
        for host in hosts
    ]
    links = slower_ways(report)
    between = [links.get(frozenset(pair)) for pair in combinations(there, 2)]
    known = [link for link in between if link is not None]
    measured = {host: rate for host, rate in rates.items() if rate is not None}
    complete = len(known) == len(between) and len(measured) == len(there)
    return ExaminedGroup(
        stage=stage,
        ranks=ranks,
        latency_ms=max((link.latency_ms for link in known), default=None),
        bandwidth_gbit_s=min((link.bandwidth_gbit_s for link in known), default=None),
        times=predicted(hosts, measured, tuple(known)) if complete and len(there) > 1 else [],
    )


def cpu_of(rates: Sequence[DeviceRates]) -> DeviceRates | None:
    """The rates of a host's processor, on which ranks compute; None if they were not measured."""
    return next((rate for rate in rates if rate.device == RANKS_ON), None)


def slower_ways(report: DoctorReport) -> dict[frozenset[str], LinkBetween]:
    """The links between hosts, each with the worse figures of its two directions."""
    ways: dict[frozenset[str], LinkBetween] = {}
    for link in report.links:
        if link.latency_ms is not None and link.bandwidth_gbit_s:
            ends = frozenset((link.source, link.to))
            back = ways.get(ends)
            ways[ends] = LinkBetween(
                ends=(link.source, link.to),
                latency_ms=max(link.latency_ms, back.latency_ms if back else 0.0),
                bandwidth_gbit_s=min(link.bandwidth_gbit_s, back.bandwidth_gbit_s if back else math.inf),
            )
    return ways


def predicted(hosts: Sequence[str], rates: dict[str, DeviceRates], links: tuple[LinkBetween, ...]) -> list[GroupTime]:
    """Times of the example's whole pass by a group over several hosts, and by its fastest host alone.

    Empty where the example cannot be shared by so many ranks. Ranks of one host share its rates.
    """
    try:
        check_divisible(EXAMPLE, len(hosts), "ranks")
    except FieldError:
        return []
    there = Counter(hosts)
    ranks = tuple(device(f"{host}, rank {i}", host, rates[host], 1 / there[host]) for i, host in enumerate(hosts))
    alone = tuple(device(host, host, rates[host], 1.0) for host in there)
    cluster = Cluster(
        name="examined",
        devices=ranks + alone,
        links=Links(local=WITHIN, between=links),
        stages=(Stage(devices=tuple(rank.name for rank in ranks), layers=(EXAMPLE.layers,), split=TENSORS),),
        engine=ranks[0].name,
    )
    group = part_timing(cluster, EXAMPLE, ranks, EXAMPLE.all_layers, head=True)
    assert isinstance(group, GroupTiming)
    each = {one.name: part_timing(cluster, EXAMPLE, [one], EXAMPLE.all_layers, head=True) for one in alone}
    found = []
    for rows in TIMED_ROWS:
        alone_s, host = min((timing.seconds(rows), name) for name, timing in each.items())
        found.append(
            GroupTime(
                rows=rows,
                group_ms=1e3 * group.seconds(rows),
                exchange_ms=1e3 * group.exchange.seconds(rows),
                alone_ms=1e3 * alone_s,
                alone_on=host,
            )
        )
    return found


def device(name: str, host: str, rates: DeviceRates, share: float) -> Device:
    """A host's processor, or the ``share`` of it that one of its ranks has."""
    return Device(
        name=name,
        host=host,
        weight_bandwidth_gb_s=share * rates.weight_bandwidth_gb_s,
        compute_tflops=share * rates.compute_tflops,
        overhead_ms=0.0,
    )


def about_groups(groups: Sequence[ExaminedGroup]) -> Iterator[str]:
    """The advice on groups: ranks that cannot run, and groups that are slower than one of their hosts."""
    for group in groups:
        where = f"stage {group.stage} ({ranks_said([rank.host for rank in group.ranks])})"
        for host, problem in {rank.host: rank.problem for rank in group.ranks if rank.threads is None}.items():
            yield f"{where} has no time predicted: {host} was not measured{f': {problem}' if problem else ''}"
        slower = [time for time in group.times if time.group_ms > time.alone_ms]
        if slower:
            told = "; ".join(
                f"{rows_said(time.rows)} would take {time.group_ms:.1f} ms, {time.exchange_ms:.1f} of them for the "
                f"exchange, and {time.alone_ms:.1f} on {time.alone_on} alone"
                for time in slower
            )
            yield (
                f"{where} is slower than one host, by {EXAMPLE_NAME}: {told}: give the ranks a faster "
                'link, or each host layers of its own (split = "layers")'
            )


def rows_said(rows: int) -> str:
    """A number of rows for people."""
    return "one row" if rows == 1 else f"{rows} rows"


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
"""Seconds within which a probe has to have started. A busy host would be called silent with fewer."""
MEASURE_S: Final = 240.0
"""Seconds that one measurement may take: torch is imported before the first."""
LOOK_EVERY: Final = 1.0
"""Seconds between two checks that a host which is to answer is still there. A loss is noticed no sooner than that."""

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
        """Have a host measure its devices that have room for it, and wait for the rates."""
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
        """Have a host measure its link to another, and wait for the figures."""
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
        """Send a host's probe a message."""
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
        """Sort messages by host and kind for ``_answer``."""
        for frames in self._inbox.take():
            with contextlib.suppress(ForeignFrame, MalformedMessage):
                message = message_of(frames, self._session)
                if isinstance(message, ProbeReady | DevicesMeasured | LinkMeasured) and message.name in self._names:
                    self._heard.setdefault((message.name, type(message)), message)

    def _is_there(self, name: str) -> bool:
        """Whether a host is attached; this one always is."""
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
    """The problem with a host's devices that had no room for a measurement; empty if all had."""
    full = [one.device for one in facts.devices if one.free is not None and one.free < NEEDED]
    return f"host {name}: {', '.join(full)} has not {NEEDED / 1e9:.1f} GB free, and was not measured" if full else ""
