"""Measurements of an engine's hosts: those that are stored, and those that are missing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from penstock.cluster.measured import LayerTimes
from penstock.cluster.spec import LinkBetween
from penstock.engine.options import EngineOptions
from penstock.engine.profile.devices import Candidates, candidates_on, profiled
from penstock.engine.profile.links import measured_links, stored_links, with_here
from penstock.engine.profile.measure import OnStep
from penstock.engine.profile.store import ProfileStore, profiles_folder
from penstock.hosts.host import FleetHost
from penstock.hosts.placement import HERE, asked_hosts
from penstock.pipeline.base import Host

Reporting = Callable[[str], OnStep]
"""Takes the name of a measurement, and returns the callback for its progress."""


@dataclass(frozen=True)
class HostsProfile:
    """The hosts' devices, layer times by device where measured, and the links between hosts; None if one is missing."""

    candidates: Candidates
    times: dict[str, LayerTimes]
    links: list[LinkBetween] | None

    @property
    def missing(self) -> str:
        """The names of what has not been measured; empty if everything has been."""
        unknown = [name for name in self.candidates.names if name not in self.times]
        return ", ".join(unknown) or ("" if self.links is not None else "the links between them")


def known_profile(options: EngineOptions, host: Host) -> HostsProfile:
    """Stored measurements of the hosts in ``options``. Raises ConfigError for one without the device, or several."""
    names, store = list(asked_hosts(options.hosts or HERE).names), ProfileStore(profiles_folder())
    fleet = host.fleet if isinstance(host, FleetHost) else None
    found = candidates_on(options, names, {} if fleet is None else fleet.living)
    known = {name: store.times(one.key) for name, one in found.devices.items()}
    links = [] if fleet is None else stored_links(with_here(names), store, encrypted=fleet.security is not None)
    return HostsProfile(found, {name: times for name, times in known.items() if times is not None}, links)


def completed(profile: HostsProfile, host: Host, reporting: Reporting, tokens: Sequence[int] = ()) -> HostsProfile:
    """Measure what is missing, and store it. ``tokens``: the text that is computed; empty for arbitrary tokens.

    Raises ConfigError for a link or a device that cannot be measured.
    """
    store, times, links = ProfileStore(profiles_folder()), dict(profile.times), profile.links
    for name, candidate in profile.candidates.devices.items():
        if name not in times:
            times[name] = profiled(candidate, host, store, reporting(f"{name}, {candidate.device}"), tokens)
    if links is None:
        assert isinstance(host, FleetHost)
        links = measured_links(host.fleet, with_here(profile.candidates.hosts), store, reporting("links"))
    return replace(profile, times=times, links=links)


def forgotten(profile: HostsProfile) -> HostsProfile:
    """The profile without its measurements, to measure everything anew; one host alone has no links."""
    return replace(profile, times={}, links=[] if profile.links == [] else None)
