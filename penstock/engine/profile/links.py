"""The links between an engine's hosts, as the doctor measures them."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Sequence
from itertools import combinations

from penstock.cluster.spec import Link, LinkBetween
from penstock.core import ConfigError
from penstock.engine.profile.measure import OnStep
from penstock.engine.profile.store import LinkKey, LinkProfile, ProfileStore
from penstock.hosts.doctor.examine import examine_links
from penstock.hosts.doctor.report import LinkRates
from penstock.hosts.fleet import Fleet
from penstock.hosts.placement import HERE, other_hosts


def slower_ways(links: Iterable[LinkRates]) -> list[LinkBetween]:
    """A link for each pair of hosts that reach each other: the lower rate and the higher latency of both directions."""
    ways: dict[tuple[str, ...], list[tuple[float, float]]] = {}
    for link in links:
        if link.latency_ms is not None and link.bandwidth_gbit_s:
            ways.setdefault(tuple(sorted((link.source, link.to))), []).append((link.bandwidth_gbit_s, link.latency_ms))
    return [
        LinkBetween(ends=ends, bandwidth_gbit_s=min(rate for rate, _ in both), latency_ms=max(ms for _, ms in both))
        for ends, both in ways.items()
    ]


def link_key(one: str, other: str, *, encrypted: bool) -> LinkKey:
    first, second = sorted((one, other))
    return LinkKey(node=platform.node(), ends=(first, second), encrypted=encrypted)


def stored_links(names: Sequence[str], store: ProfileStore, *, encrypted: bool) -> list[LinkBetween] | None:
    """The stored links between every two of these hosts; None if one has not been measured."""
    found = []
    for pair in combinations(names, 2):
        key = link_key(*pair, encrypted=encrypted)
        link = store.link(key)
        if link is None:
            return None
        found.append(LinkBetween(ends=key.ends, bandwidth_gbit_s=link.bandwidth_gbit_s, latency_ms=link.latency_ms))
    return found


def measured_links(fleet: Fleet, names: Sequence[str], store: ProfileStore, on_step: OnStep) -> list[LinkBetween]:
    """Measure and store the links between these hosts and this one. Raises ConfigError if one cannot be measured."""
    rates = examine_links(other_hosts(names), fleet.security, fleet.private_network, on_step)
    if problems := [link.problem for link in rates if link.problem]:
        raise ConfigError("; ".join(problems))
    found = slower_ways(rates)
    for link in found:
        key = link_key(*link.ends, encrypted=fleet.security is not None)
        store.keep(LinkProfile(key=key, link=Link(bandwidth_gbit_s=link.bandwidth_gbit_s, latency_ms=link.latency_ms)))
    return found


def with_here(names: Sequence[str]) -> list[str]:
    """These hosts with the engine's own first: links lead to it, whether it holds a stage or not."""
    return [HERE, *other_hosts(names)]
