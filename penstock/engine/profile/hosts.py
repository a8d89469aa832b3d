"""Profiles of several hosts: their links, and the cluster that plans are made for."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from typing import Final

import msgspec

from penstock.cluster.spec import Cluster, Device, LayerTimes, Link, LinkBetween, Links, ModelPrice, Stage, eagle
from penstock.cluster.timing import MESSAGE_ROW_BYTES, LinkTiming, MeasuredTiming, StageTiming
from penstock.core import ConfigError
from penstock.engine.options import EngineOptions
from penstock.engine.profile.measure import Candidate, Candidates, OnStep, candidates_on, key_of, price_of, profiled
from penstock.engine.profile.store import LinkKey, LinkProfile, ProfileStore, digest_of, profiles_folder
from penstock.engine.resolve import PrefillTimes, Resolved
from penstock.files import DTYPE_BYTES
from penstock.hosts.doctor import examine_links
from penstock.hosts.facts import HostFacts, own_facts
from penstock.hosts.fleet import Fleet, FleetExecutor
from penstock.hosts.placement import HERE, asked_hosts, other_hosts, ranks_said
from penstock.hosts.probe import LinkRates
from penstock.pipeline.base import Executor

# ---------------------------------------------------------------------------------------------------------------- links
# The links between an engine's hosts, as the doctor measures them.


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
    """The key of a link between two hosts, the same in both directions."""
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


# ---------------------------------------------------------------------------------------------------------------- hosts
# Measurements of an engine's hosts: those that are stored, and those that are missing.

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
        """The devices that have not been measured, else the links in words; empty if nothing is missing."""
        unknown = [name for name in self.candidates.names if name not in self.times]
        return ", ".join(unknown) or ("" if self.links is not None else "the links between them")


def known_profile(options: EngineOptions, executor: Executor) -> HostsProfile:
    """Stored measurements of the hosts in ``options``. Raises ConfigError for one without the device, or several."""
    names, store = list(asked_hosts(options.hosts or HERE).names), ProfileStore(profiles_folder())
    fleet = executor.fleet if isinstance(executor, FleetExecutor) else None
    found = candidates_on(options, names, {} if fleet is None else fleet.living)
    known = {name: store.times(one.key) for name, one in found.devices.items()}
    links = [] if fleet is None else stored_links(with_here(names), store, encrypted=fleet.security is not None)
    return HostsProfile(found, {name: times for name, times in known.items() if times is not None}, links)


def completed(
    profile: HostsProfile, executor: Executor, reporting: Reporting, tokens: Sequence[int] = ()
) -> HostsProfile:
    """Measure what is missing, and store it. ``tokens``: the text that is computed; empty for arbitrary tokens.

    Raises ConfigError for a link or a device that cannot be measured.
    """
    store, times, links = ProfileStore(profiles_folder()), dict(profile.times), profile.links
    for name, candidate in profile.candidates.devices.items():
        if name not in times:
            times[name] = profiled(candidate, executor, store, reporting(f"{name}, {candidate.device}"), tokens)
    if links is None:
        assert isinstance(executor, FleetExecutor)
        links = measured_links(executor.fleet, with_here(profile.candidates.hosts), store, reporting("links"))
    return replace(profile, times=times, links=links)


def forgotten(profile: HostsProfile) -> HostsProfile:
    """The profile without its measurements, to measure everything anew; one host alone has no links."""
    return replace(profile, times={}, links=[] if profile.links == [] else None)


# --------------------------------------------------------------------------------------------------------------- stages
# Times of an engine's own stages and links for a prompt's pieces, where all of them have been measured.

LOCAL_S: Final = 1e-4
"""Assumed latency of a message between two processes of one host, in seconds. A hop was measured to add 0.04 to 0.12 ms
to a step (``benchmarks.costs.hop_floor``)."""
LOCAL_BYTES_PER_S: Final = 1e9
"""Assumed rate of a message between two processes of one host, in bytes per second. Messages of 64 KiB were measured at
0.96 GB/s with TLS and 2.5 without (``benchmarks.costs.links``)."""


def with_prefill_times(setup: Resolved, living: Mapping[str, HostFacts], *, encrypted: bool) -> Resolved:
    """The setup with its pipeline's times, if every stage's device and every link has been measured."""
    folder = profiles_folder()
    # What was measured are whole layers, of which a rank computes a share.
    if setup.ranks or setup.emulated or setup.options.prefill_chunk is not None or not folder.is_dir():
        return setup
    store = ProfileStore(folder)
    stages, links = stage_times(setup, living, store), link_times(setup, store, encrypted=encrypted)
    return setup if stages is None or links is None else replace(setup, prefill_times=PrefillTimes(stages, links))


GATHERS: Final = 4
"""Number of times in a layer that the ranks of a stage wait for each other's columns. ``cluster.timing.GATHERS`` names
them."""


def slow_groups(setup: Resolved, living: Mapping[str, HostFacts], *, encrypted: bool) -> Iterator[str]:
    """A remark on each stage whose ranks wait longer for each other than they save, as far as that was measured.

    It is a lower bound for a batch of one row: every gather takes the slowest link's latency at least.
    """
    folder = profiles_folder()
    for stage, (group, (first, last)) in enumerate(zip(setup.groups, setup.layers, strict=True)):
        hosts = list(dict.fromkeys(map(named, group)))
        if len(hosts) == 1 or not folder.is_dir():
            continue
        store, first_facts = ProfileStore(folder), own_facts("") if hosts[0] == HERE else living[hosts[0]]
        links = stored_links(sorted(hosts), store, encrypted=encrypted)
        key = key_of(hosts[0], first_facts, setup, digest_of(setup.checkpoint.source), stage=stage)
        times = store.times(msgspec.structs.replace(key, threads=setup.ranks[stage][0].threads))
        if links is None or times is None:
            continue
        alone_ms = (last - first) * times.layer_ms[0][0]
        waits_ms = (last - first) * GATHERS * max(link.latency_ms for link in links)
        if waits_ms > alone_ms * (1 - 1 / len(group)):
            yield (
                f"stage {stage}: its {ranks_said(group)} wait for each other for {waits_ms:.1f} ms a batch, and "
                f"{hosts[0]} alone would take {alone_ms:.1f} ms for its layers; use pipeline_parallel_size there"
            )


def stage_times(
    setup: Resolved, living: Mapping[str, HostFacts], store: ProfileStore
) -> tuple[StageTiming, ...] | None:
    """Times of each stage, without the head, which only a prompt's last row needs; None if one is not measured."""
    facts = {name: own_facts("") if name == HERE else living[name] for name in map(named, setup.hosts)}
    digest, found, price = digest_of(setup.checkpoint.source), [], price_of(setup)
    for i, layers in enumerate(setup.layers):
        host = named(setup.hosts[i])
        times = store.times(key_of(host, facts[host], setup, digest, stage=i))
        if times is None:
            return None
        grid = times.of_stage(price.counts(range(*layers)), head=False)
        found.append(StageTiming(devices=(MeasuredTiming(times.rows, times.contexts, grid),)))
    return tuple(found)


def link_times(setup: Resolved, store: ProfileStore, *, encrypted: bool) -> tuple[LinkTiming, ...] | None:
    """Times of the links engine to first stage, stage to stage, last stage to engine; None if one is not measured."""
    stops = [HERE, *map(named, setup.hosts), HERE]
    known: dict[frozenset[str], LinkBetween] = {}
    for hop in {frozenset(hop) for hop in pairwise(stops) if hop[0] != hop[1]}:
        links = stored_links(sorted(hop), store, encrypted=encrypted)
        if links is None:
            return None
        known[hop] = links[0]
    state = float(setup.checkpoint.hidden_size * DTYPE_BYTES[setup.options.dtype])
    return tuple(
        link_time(known.get(frozenset(hop)), state if 0 < i < setup.stages else MESSAGE_ROW_BYTES)
        for i, hop in enumerate(pairwise(stops))
    )


def link_time(link: LinkBetween | None, row_bytes: float) -> LinkTiming:
    """The times of a link; None stands for one within a host."""
    if link is None:
        return LinkTiming(LOCAL_S, LOCAL_BYTES_PER_S, row_bytes)
    return LinkTiming(link.latency_ms / 1e3, link.bandwidth_gbit_s * 1e9 / 8, row_bytes)


def named(host: str) -> str:
    """The name that options have for a host of a plan."""
    return host or HERE


# -------------------------------------------------------------------------------------------------------------- cluster
# Turns measured hosts into a cluster to plan for: their devices, and the links between them.


def cluster_of_hosts(profile: HostsProfile, *, drafts: bool, drafter_host: str = HERE) -> Cluster:
    """The measured hosts as a cluster. The engine is on this host; an EAGLE-like drafter, if it ``drafts``, on its own.

    If this host is not among them, it is assumed to be like the first. Everything has to have been measured.
    """
    found, price, links = profile.candidates, profile.candidates.price, profile.links
    assert links is not None, "nothing is missing"
    devices = [measured_device(one, profile.times[name], price) for name, one in found.devices.items()]
    if HERE not in found.hosts:
        devices.append(replace(devices[0], name=HERE, host=HERE, memory_gb=None, measured=None))
    here = next(device.name for device in devices if device.host == HERE)
    within = Link(bandwidth_gbit_s=8 * LOCAL_BYTES_PER_S / 1e9, latency_ms=1e3 * LOCAL_S)
    return Cluster(
        name="hosts",
        description="hosts that penstock profile has measured",
        devices=tuple(devices),
        links=Links(local=within, between=tuple(links)),
        stages=tuple(Stage(devices=(name,)) for name in found.names),
        engine=here,
        drafter=next((one.name for one in devices if one.host == drafter_host), here) if drafts else None,
        as_model=price,
        draft_as_model=eagle(price) if drafts else None,
        kv_slots=found.capacity,
    )


def measured_device(candidate: Candidate, times: LayerTimes, price: ModelPrice) -> Device:
    """The candidate with its measured layer times, and with rates derived from them, which price a drafter there."""
    one_s, many_s = (price.layers * times.layer_ms[row][0] / 1e3 for row in (0, -1))
    return Device(
        name=candidate.label,
        host=candidate.name,
        memory_gb=None if candidate.free is None else max(1, candidate.free) / 1e9,  # a cluster has no device of 0 GB
        weight_bandwidth_gb_s=price.weight_bytes(price.all_layers, head=False) / one_s / 1e9,
        compute_tflops=price.row_operations(price.all_layers, head=False) * times.rows[-1] / many_s / 1e12,
        overhead_ms=times.stage_ms[0],
        measured=times,
    )
