"""Times of an engine's own stages and links for a prompt's pieces, where all of them have been measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Final

from penstock.cluster.spec import LinkBetween
from penstock.cluster.timing import MESSAGE_ROW_BYTES, LinkTiming, MeasuredTiming, StageTiming
from penstock.dtypes import DTYPE_BYTES
from penstock.engine.profile.devices import key_of
from penstock.engine.profile.digest import digest_of
from penstock.engine.profile.links import stored_links
from penstock.engine.profile.store import ProfileStore, profiles_folder
from penstock.engine.resolve import PrefillTimes, Resolved
from penstock.hosts.facts import HostFacts, own_facts
from penstock.hosts.placement import HERE

LOCAL_S: Final = 1e-4
LOCAL_BYTES_PER_S: Final = 1e9
"""Latency in seconds, and rate in bytes/s, of a message between two processes of one host."""


def with_prefill_times(setup: Resolved, living: Mapping[str, HostFacts], *, encrypted: bool) -> Resolved:
    """The setup with its pipeline's times, if every stage's device and every link has been measured."""
    folder = profiles_folder()
    if setup.emulated or setup.options.prefill_chunk is not None or not folder.is_dir():
        return setup
    store = ProfileStore(folder)
    stages, links = stage_times(setup, living, store), link_times(setup, store, encrypted=encrypted)
    return setup if stages is None or links is None else replace(setup, prefill_times=PrefillTimes(stages, links))


def stage_times(
    setup: Resolved, living: Mapping[str, HostFacts], store: ProfileStore
) -> tuple[StageTiming, ...] | None:
    """Times of each stage, without the head, which only a prompt's last row needs; None if one is not measured."""
    facts = {name: own_facts("") if name == HERE else living[name] for name in map(named, setup.hosts)}
    digest, found = digest_of(setup.checkpoint.source), []
    for i, (first, last) in enumerate(setup.layers):
        host = named(setup.hosts[i])
        times = store.times(key_of(host, facts[host], setup, digest, stage=i))
        if times is None:
            return None
        grid = times.of_stage(last - first, head=False)
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
