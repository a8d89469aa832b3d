"""``penstock hosts`` and ``penstock doctor``: workers on a LAN, tables of hosts and links, and advice."""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final

import msgspec
from msgspec.structs import replace
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from zeroconf import ServiceBrowser, ServiceInfo, ServiceStateChange, Zeroconf

from penstock.cluster import load_cluster
from penstock.config import FieldError
from penstock.core import ConfigError
from penstock.environment import LAN, require
from penstock.hosts.doctor import about_groups, examine, examine_links, examined_group, groups_of
from penstock.hosts.facts import DeviceFacts, HostFacts
from penstock.hosts.fleet import Fleet
from penstock.hosts.keys import security_for
from penstock.hosts.messages import BEAT
from penstock.hosts.placement import HERE, named_hosts, other_hosts
from penstock.hosts.probe import DeviceRates, DoctorReport, ExaminedHost, LinkRates
from penstock.hosts.remote import ClockOffset
from penstock.terminal import FiguresTable, progress_bar

# ------------------------------------------------------------------------------------------------------------ discovery
# Workers on a LAN, found by multicast DNS: addresses to try, on which nothing relies. Needs the extra ``lan``.
#
# Anybody on the network can announce anything. The addresses are shown to a person, who names the hosts.

SERVICE: Final = "_penstock._tcp.local."
"""The name of the service under which multicast DNS lists workers."""
LOOK_S: Final = 3.0
"""Seconds to wait for announcements, long enough for workers on a LAN to answer."""


class Announcement:
    """Announces on the network that a worker listens at ``address``, HOST:PORT in numbers, until ``close``."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        host = host.strip("[]")
        self._zeroconf = Zeroconf(interfaces=[host])
        name = f"penstock-{host}-{port}".replace(".", "-").replace(":", "-")
        info = ServiceInfo(SERVICE, f"{name}.{SERVICE}", parsed_addresses=[host], port=int(port))
        self._zeroconf.register_service(info, cooperating_responders=True)

    def close(self) -> None:
        self._zeroconf.close()

    def __enter__(self) -> Announcement:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


def announced(seconds: float = LOOK_S, **interfaces: Any) -> list[str]:
    """The addresses (HOST:PORT) that are announced within ``seconds``, sorted."""
    found: set[str] = set()

    def heard(zeroconf: Zeroconf, service_type: str, name: str, state_change: ServiceStateChange) -> None:
        if state_change is not ServiceStateChange.Removed:
            info = zeroconf.get_service_info(service_type, name, timeout=round(1e3 * seconds))
            found.update(addresses_of(info) if info is not None else ())

    zeroconf = Zeroconf(**interfaces)
    try:
        ServiceBrowser(zeroconf, SERVICE, handlers=[heard])
        time.sleep(seconds)
    finally:
        zeroconf.close()
    return sorted(found)


def addresses_of(info: ServiceInfo) -> list[str]:
    """The addresses HOST:PORT of a service, rebuilt from its numbers: a stranger's text is never shown."""
    addresses = (ipaddress.ip_address(one) for one in info.parsed_addresses())
    return [f"[{one}]:{info.port}" if one.version == 6 else f"{one}:{info.port}" for one in addresses]


# -------------------------------------------------------------------------------------------------------------- listing
# The command ``penstock hosts``: shows which hosts answer, and their devices.

LISTEN_S: Final = 3 * BEAT
"""Seconds for which beats go there and back; the quickest of them gives the round trip. Three beats are enough for one
that nothing delays."""
LINK: Final = "link to, from"
"""The column that is shown only if links were measured."""
HEADINGS: Final = ("device", "memory free", "cores", "round trip", LINK, "Penstock", "torch", "model")
"""The columns behind the host's name."""


class ListedHost(msgspec.Struct, frozen=True, kw_only=True):
    """A host by its name, with its facts, or else the ``problem``. ``clock``: offset and its error, in seconds.

    ``links``: to the host and from it; None if they were not measured.
    """

    host: str
    problem: str = ""
    facts: HostFacts | None = None
    clock: ClockOffset | None = None
    links: tuple[LinkRates, LinkRates] | None = None


def suggest_hosts(as_json: bool) -> None:
    """Print the addresses that workers on this network announce. Raises ConfigError where zeroconf is missing."""
    require([LAN])

    found = announced()
    if as_json:
        print(msgspec.json.encode(found).decode())
    elif found:
        print(f"Announced on this network, by whomever; to ask them:\n\n  penstock hosts {','.join(found)}")
    else:
        print("Nobody announces a worker on this network (`penstock worker --announce`).")


def list_hosts(text: str, keys: str | None, insecure: bool, links: bool, as_json: bool) -> None:
    """Print the hosts that ``text`` names; with ``links`` measure and print their links with this host, too.

    Raises ConfigError for invalid names, and if no host can be used.
    """
    names = named_hosts(text)
    with ThreadPoolExecutor(len(names)) as apart:
        listed = list(apart.map(partial(asked, keys=keys, insecure=insecure), names))
    if links:
        listed = with_links(listed, keys, insecure)
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(listed)).decode())
    else:
        show(listed)
    if not any(one.facts for one in listed):
        raise ConfigError("; ".join(one.problem for one in listed))


def asked(name: str, keys: str | None, insecure: bool) -> ListedHost:
    """A host's facts and clock, after ``LISTEN_S`` seconds of beats, or else the problem."""
    try:
        fleet = Fleet([name], security_for(keys, insecure), private_network=insecure)
    except ConfigError as error:
        return ListedHost(host=name, problem=str(error))
    try:
        time.sleep(LISTEN_S)
        host = fleet.hosts[name]
        return ListedHost(host=name, facts=host.facts, clock=host.offsets.best, problem=host.cause)
    finally:
        fleet.close()


def with_links(listed: Sequence[ListedHost], keys: str | None, insecure: bool) -> list[ListedHost]:
    """The hosts with the rates of their links to and from this one, where they answer."""
    names = [one.host for one in listed if one.facts is not None]
    pairs = [pair for name in names for pair in ((HERE, name), (name, HERE))]
    rates = examine_links(names, security_for(keys, insecure), insecure, lambda done, total: None, pairs)
    both = {name: (rates[2 * i], rates[2 * i + 1]) for i, name in enumerate(names)}
    return [replace(one, links=both.get(one.host)) for one in listed]


def show(listed: Sequence[ListedHost]) -> None:
    """Print a table of the hosts that answer, and then a line for each problem."""
    columns = [i for i, name in enumerate(HEADINGS, 1) if name != LINK or any(one.links for one in listed)]
    table = FiguresTable("host", *(HEADINGS[i - 1] for i in columns))
    for one in listed:
        if one.facts is not None:
            cells = cells_of(one, one.facts)
            table.add_row(*(escape(cells[i]) for i in (0, *columns)))
    console = Console(highlight=False)
    if table.row_count:
        console.print(table)
    for one in listed:
        if one.problem:
            console.print(one.problem, markup=False, soft_wrap=True)
        if one.facts is not None and one.facts.unlisted:
            console.print(f"{one.host} may have GPUs: {one.facts.unlisted}", markup=False, soft_wrap=True)


def cells_of(host: ListedHost, facts: HostFacts) -> list[str]:
    """The cells of a host's row, with a line in them for each device."""
    return [
        host.host,
        "\n".join(device.device for device in facts.devices),
        "\n".join(map(memory_of, facts.devices)),
        str(facts.cores),
        "" if host.clock is None else f"{2e3 * host.clock.error:.2f} ms",  # the error is half the round trip
        "" if host.links is None else f"{rate_of(host.links[0])}, {rate_of(host.links[1])} Gbit/s",
        facts.versions.penstock,
        facts.versions.torch,
        "\n".join(device.model for device in facts.devices),
    ]


def rate_of(link: LinkRates) -> str:
    """A link's rate in Gbit/s; ? if it was not measured."""
    return "?" if link.bandwidth_gbit_s is None else f"{link.bandwidth_gbit_s:.2f}"


def memory_of(device: DeviceFacts) -> str:
    """A device's free and whole memory in GB."""
    if device.memory is None:
        return "unknown"
    free = "unknown" if device.free is None else f"{device.free / 1e9:.1f}"
    return f"{free} of {device.memory / 1e9:.1f} GB"


# --------------------------------------------------------------------------------------------------------------- advice
# Advice on what to change, from a doctor's measurements.

SLOWER: Final = 4.0
"""Factor by which a link may be slower than the fastest one, or than its own reverse direction, without advice. It lies
below the factor of ten between generations of Ethernet, so that a wrong port or cable shows."""
SLOW_GBIT_S: Final = 0.5
"""Rate, in 1e9 bits/s, below which a link is no modern Ethernet. Gigabit Ethernet carries 0.94."""
LATE_MS: Final = 2.0
"""Latency, in milliseconds, above which a network is not a wired one."""
UNEQUAL: Final = 1.3
"""Factor by which devices may differ in speed without advice: a stage then waits little for another."""
FREE: Final = 0.5
"""Share (0 to 1) of its memory that a device should have free. With less free, something else runs there."""


def advice_of(report: DoctorReport) -> list[str]:
    """One sentence for each problem: links, groups of ranks, devices, then memory; empty if there is none."""
    return [*about_links(report), *about_groups(report.groups), *about_devices(report), *about_memory(report)]


def about_links(report: DoctorReport) -> Iterator[str]:
    """Advice on links: those that fail, that are slower than others or than their way back, and that are late."""
    rates = {(one.source, one.to): one.bandwidth_gbit_s for one in report.links if one.bandwidth_gbit_s}
    fastest = max(rates.values(), default=0.0)
    for link in report.links:
        if link.problem:
            yield (
                f"{link.source} cannot send to {link.to}: {link.problem}; let the hosts reach each other's ports: "
                "stages listen at those that the system chooses"
            )
            continue
        assert link.bandwidth_gbit_s is not None
        assert link.latency_ms is not None
        back = rates.get((link.to, link.source), 0.0)
        if SLOWER * link.bandwidth_gbit_s < back:
            yield f"{slow(link)}, the way back {megabits(back)}: look for a limit in one direction, or another duplex"
        elif SLOWER * link.bandwidth_gbit_s < fastest:
            yield f"{slow(link)}, the fastest link {megabits(fastest)}: check its cable and port, or use another host"
        elif link.bandwidth_gbit_s < SLOW_GBIT_S:
            yield f"{slow(link)}: a wired network carries a thousand"
        if link.latency_ms > LATE_MS and link.source < link.to:
            yield (
                f"{link.source} and {link.to} are {link.latency_ms:.1f} ms apart, which every token pays at each pass: "
                "use a wired network without detours"
            )


def slow(link: LinkRates) -> str:
    """Words for a link and its rate, with which advice begins."""
    assert link.bandwidth_gbit_s is not None
    return f"{link.source} to {link.to} carries {megabits(link.bandwidth_gbit_s)}"


def megabits(gbit_s: float) -> str:
    """A rate in Mbit/s, of ``gbit_s`` in 1e9 bits/s."""
    return f"{1e3 * gbit_s:.0f} Mbit/s" if gbit_s >= 0.01 else f"{1e3 * gbit_s:.2f} Mbit/s"


def about_devices(report: DoctorReport) -> Iterator[str]:
    """Advice on devices that read weights more slowly than the fastest one."""
    measured = {(one.host, rate.device): rate.weight_bandwidth_gb_s for one in report.hosts for rate in one.rates}
    fastest = max(measured.values(), default=0.0)
    for (host, device), rate in measured.items():
        if UNEQUAL * rate < fastest:
            yield (
                f"{host}: {device} reads weights at {rate:.1f} GB/s, the fastest device at {fastest:.1f}: a stage "
                "there should have fewer layers, in proportion (--layer-split)"
            )


def about_memory(report: DoctorReport) -> Iterator[str]:
    """Advice on devices whose memory is in use, and on GPUs that could not be listed."""
    for one in report.hosts:
        for device in one.facts.devices if one.facts is not None else ():
            if device.free is not None and device.memory is not None and device.free < FREE * device.memory:
                yield f"{one.host}: {device.device} has {memory_of(device)} free: end what else runs there"
        if one.facts is not None and one.facts.unlisted:
            yield f"{one.host} may have GPUs that are not listed: {one.facts.unlisted}"


# ----------------------------------------------------------------------------------------------------------------- show
# Prints a doctor's report for a person.

ROWS_BITS: Final = 64 * 4096 * 16
"""Bits of the hidden states of 64 rows of Llama-3.1-8B (hidden size 4096) in bfloat16."""


def show_report(report: DoctorReport, console: Console) -> None:
    """Print a report's tables, then problems and advice."""
    tables = [hosts_table(report), devices_table(report), links_table(report), groups_table(report)]
    for table in tables:
        if table.row_count:
            console.print(table)
            console.print()
    for host in report.hosts:
        if host.problem:
            console.print(f"{host.problem}\n", highlight=False, markup=False)
    console.print("To change:" if report.advice else "Nothing to change.")
    for sentence in report.advice:
        console.print(f"- {sentence}.", highlight=False, markup=False)


def hosts_table(report: DoctorReport) -> Table:
    """A table with a row for each host that answers."""
    table = Table("host", "Penstock", "torch", "clock, by this one's", box=None, header_style="bold")
    for host in report.hosts:
        if host.facts is not None:
            table.add_row(host.host, host.facts.versions.penstock, host.facts.versions.torch, clock_of(host))
    return table


def clock_of(host: ExaminedHost) -> str:
    """A clock's offset by this host's, in seconds, with its error."""
    return "" if host.clock is None else f"{host.clock.seconds:+.4f} s, ±{1e3 * host.clock.error:.2f} ms"


def devices_table(report: DoctorReport) -> Table:
    """A table with a row for each device. ``rows/s``: with one row at a time, and with 64."""
    headings = ("host", "device", "memory free", "threads", "weights", "operations", "rows/s\nof 1, 64")
    table = Table(*headings, box=None, header_style="bold")
    for host in report.hosts:
        rates = {rate.device: rate for rate in host.rates}
        for device in host.facts.devices if host.facts is not None else ():
            measured = rates_of(rates[device.device]) if device.device in rates else ("not measured", "", "", "")
            table.add_row(host.host, device.device, memory_of(device), *measured)
    return table


def rates_of(rate: DeviceRates) -> tuple[str, str, str, str]:
    """Threads, rate of weights, operations a second, and rows a second of batches of 1 and 64."""
    rows = f"{rate.rows_per_second[1]:.0f}, {rate.rows_per_second[64]:.0f}"
    return str(rate.threads), f"{rate.weight_bandwidth_gb_s:.1f} GB/s", operations_of(rate.compute_tflops), rows


def operations_of(tflops: float) -> str:
    """Operations a second, of ``tflops`` in 1e12 a second."""
    return f"{tflops:.1f} TFLOPS" if tflops >= 1 else f"{1e3 * tflops:.0f} GFLOPS"


def links_table(report: DoctorReport) -> Table:
    """A table with a row for each link, and its milliseconds for the hidden states of ``ROWS_BITS``."""
    table = Table("from", "to", "latency", "rate", "64 rows of 4096, bfloat16", box=None, header_style="bold")
    for link in report.links:
        if link.latency_ms is not None and link.bandwidth_gbit_s is not None:
            # ROWS_BITS / (1e9 bits/s) are nanoseconds: 1e6 of them are a millisecond.
            rows_ms = link.latency_ms + ROWS_BITS / link.bandwidth_gbit_s / 1e6
            rate = megabits(link.bandwidth_gbit_s)
            table.add_row(link.source, link.to, f"{link.latency_ms:.2f} ms", rate, f"{rows_ms:.1f} ms")
    return table


def groups_table(report: DoctorReport) -> Table:
    """A table with a row for each tensor parallel stage, and a line in it for each rank."""
    headings = ("stage", "rank on", "threads", "slowest link", "1, 64 rows\npredicted", "of it\nexchange", "one host")
    table = Table(*headings, box=None, header_style="bold")
    for group in report.groups:
        link = "shared memory" if len({rank.host for rank in group.ranks}) == 1 else "not measured"
        if group.latency_ms is not None and group.bandwidth_gbit_s is not None:
            link = f"{group.latency_ms:.2f} ms, {megabits(group.bandwidth_gbit_s)}"
        table.add_row(
            str(group.stage),
            "\n".join(rank.host for rank in group.ranks),
            "\n".join("?" if rank.threads is None else str(rank.threads) for rank in group.ranks),
            link,
            times_of(time.group_ms for time in group.times),
            times_of(time.exchange_ms for time in group.times),
            times_of(time.alone_ms for time in group.times),
        )
    return table


def times_of(times: Iterable[float]) -> str:
    """Milliseconds, one after the other; empty for none."""
    told = ", ".join(f"{ms:.1f}" for ms in times)
    return f"{told} ms" if told else ""


# -------------------------------------------------------------------------------------------------------------- command
# The command ``penstock doctor``.


def run_doctor(hosts: str | None, cluster: str | None, keys: str | None, insecure: bool, as_json: bool) -> None:
    """Examine the hosts, and print a report. Raises ConfigError for invalid names, and if no host can be used."""
    names = hosts_to_examine(hosts, cluster)
    with progress_bar(Console(stderr=True)) as bar:
        task = bar.add_task("measuring hosts and links", total=None)
        found = examine(names, keys, insecure, lambda done, total: bar.update(task, completed=done, total=total))
    groups = groups_of(load_cluster(cluster)) if cluster is not None else {}
    found = replace(found, groups=[examined_group(stage, ranks, found) for stage, ranks in groups.items()])
    report = replace(found, advice=advice_of(found))
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(report)).decode())
    else:
        show_report(report, Console(soft_wrap=True))
    if names and not any(one.facts for one in report.hosts[1:]):
        raise ConfigError("; ".join(one.problem for one in report.hosts[1:]))


def hosts_to_examine(hosts: str | None, cluster: str | None) -> list[str]:
    """The hosts beside this one. Raises ConfigError for invalid names, and for an emulated cluster."""
    if hosts is not None and cluster is not None:
        raise FieldError("hosts", "is left out where a cluster file names them")
    if hosts is not None:
        return other_hosts(named_hosts(hosts))
    if cluster is None:
        return []
    loaded = load_cluster(cluster)
    if loaded.emulated:
        raise FieldError("cluster", f"{loaded.name} is emulated: there is nothing to measure")
    return other_hosts(dict.fromkeys(device.host for device in loaded.devices))
