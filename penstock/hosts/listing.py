"""The command ``penstock hosts``: shows which hosts answer, and their devices."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final

import msgspec
from msgspec.structs import replace
from rich.console import Console
from rich.markup import escape

from penstock.core import ConfigError
from penstock.extras import LAN, require
from penstock.hosts.control import BEAT
from penstock.hosts.doctor.examine import examine_links
from penstock.hosts.doctor.report import LinkRates
from penstock.hosts.facts import DeviceFacts, HostFacts
from penstock.hosts.fleet import Fleet
from penstock.hosts.keys import security_for
from penstock.hosts.offsets import ClockOffset
from penstock.hosts.placement import HERE, named_hosts
from penstock.tables import FiguresTable

LISTEN_S: Final = 3 * BEAT
"""Seconds for which beats go there and back; the quickest of them gives the round trip."""
LINK: Final = "link to, from"
"""The column that is shown only if links were measured."""
HEADINGS: Final = ("device", "memory free", "cores", "round trip", LINK, "Penstock", "torch", "model")


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
    from penstock.hosts.discovery import announced

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
    names = [one.host for one in listed if one.facts is not None]
    pairs = [pair for name in names for pair in ((HERE, name), (name, HERE))]
    rates = examine_links(names, security_for(keys, insecure), insecure, lambda done, total: None, pairs)
    both = {name: (rates[2 * i], rates[2 * i + 1]) for i, name in enumerate(names)}
    return [replace(one, links=both.get(one.host)) for one in listed]


def show(listed: Sequence[ListedHost]) -> None:
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
    return "?" if link.bandwidth_gbit_s is None else f"{link.bandwidth_gbit_s:.2f}"


def memory_of(device: DeviceFacts) -> str:
    if device.memory is None:
        return "unknown"
    free = "unknown" if device.free is None else f"{device.free / 1e9:.1f}"
    return f"{free} of {device.memory / 1e9:.1f} GB"
