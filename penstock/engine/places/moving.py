"""Decides where stages go when their hosts are lost, and when hosts are back."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from penstock.core import ConfigError, PipelineError
from penstock.engine.places.footprint import needed_bytes
from penstock.engine.places.opening import layers_by_host, present, providing
from penstock.engine.resolve import Resolved, devices_of, resolve_options, threads_of
from penstock.hosts.facts import HostFacts
from penstock.hosts.fleet import Fleet
from penstock.hosts.host import FleetHost
from penstock.hosts.placement import HERE, has_room, in_plans, moved
from penstock.pipeline.base import Host

log = logging.getLogger(__name__)


Living = Mapping[str, HostFacts]
"""Facts of the hosts by name, at one moment. A whole move is decided on one such snapshot."""


def resolving(asked: Resolved, host: Host) -> Generator[float, None, Resolved]:
    """Place the stages on the hosts that are there now. Yields times at which to go on, until these hold their layers.

    Each stage stays on its host as long as that is there, since it keeps its weights. The others go to spares, or to
    hosts that have stages already. Where they have no room, all layers are split anew, into no more stages than before.
    A host that is still being sent its layers gets no stage, unless there is no other way. Raises PipelineError while
    there is no way at all.
    """
    if not isinstance(host, FleetHost):
        return asked
    living = host.fleet.living
    names = names_there(asked, host.fleet, living)
    if asked.options.hosts is None:  # a cluster file's stages have their places
        if missing := [name for name in asked.hosts if name not in names]:
            raise PipelineError(f"host {missing[0]} is not there")
        makers: list[Callable[[], Resolved]] = [partial(replace, asked)]
    else:
        makers = placements(asked, names, host.fleet.searching, living)
    problem = "none of the hosts is there"
    for make in makers:
        try:
            setup = make()
            yield from providing(setup, host, living)
        except ConfigError as error:
            log.warning("stages have no place: %s", error)
            problem = str(error)
        else:
            return setup
    raise PipelineError(problem)


def placements(
    asked: Resolved, names: Sequence[str], searching: Collection[str], living: Living
) -> list[Callable[[], Resolved]]:
    """Ways to place the stages, the best one first; each raises ConfigError if it does not work."""
    ready = [name for name in names if name not in searching]
    return [
        partial(make, asked, some, living)
        for some in (ready, names if ready != names else [])
        if some
        for make in (same_split, split_anew)
    ]


def names_there(asked: Resolved, fleet: Fleet, living: Living) -> list[str]:
    """The hosts that stages may be on now, as plans name them."""
    if asked.options.hosts is None:
        return ["", *living]
    there = dict.fromkeys(map(in_plans, present(asked.options.hosts, fleet)))
    return [name for name in there if not name or name in living]


def lost_a_host(running: Resolved, host: Host) -> bool:
    """Whether a host that stages are on is not there any more."""
    return isinstance(host, FleetHost) and any(name and name not in host.fleet.living for name in running.hosts)


def better_place(asked: Resolved, running: Resolved, host: Host) -> bool:
    """Whether stages share a host, and another host, which holds the layers, could take some of them.

    A host that lacks the layers is asked to fetch them while the engine runs.
    """
    if not isinstance(host, FleetHost) or running is asked:
        return False
    living = host.fleet.living
    names = names_there(asked, host.fleet, living)
    if len(set(running.hosts)) >= min(len(set(asked.hosts)), len(names)):
        return False
    try:
        layers = layers_by_host(same_split(asked, names, living))
        offer = host.offer(asked.checkpoint.source, asked.checkpoint.num_layers)
        host.fleet.ask(offer, layers)
    except (ConfigError, PipelineError, OSError) as error:
        log.info("stages stay where they are: %s", error)
        return False
    return host.fleet.hold(offer, layers)


def same_split(asked: Resolved, names: Sequence[str], living: Living) -> Resolved:
    """The same stages on the hosts ``names``. Raises ConfigError if a stage fits nowhere."""
    needed, options = needed_bytes(asked), asked.options

    def takes(name: str, stages: Sequence[int]) -> bool:
        wanted = [needed[stage] for stage in sorted(stages)]
        return not name or (name in living and has_room(name, living[name], options.device, wanted))

    hosts = moved(asked.hosts, names, takes)
    drafts = asked.draft is not None or asked.speculator is not None
    return replace(
        asked,
        hosts=hosts,
        devices=devices_of(options, hosts, living),
        threads=threads_of(options, asked.cluster, hosts, living, drafts=drafts),
    )


def split_anew(asked: Resolved, names: Sequence[str], living: Living) -> Resolved:
    """The layers split evenly over ``names``, no more stages on a host than were asked for. Raises ConfigError."""
    each = -(-asked.stages // len(set(asked.hosts)))
    options = replace(
        asked.options,
        hosts=",".join(name or HERE for name in names),
        pipeline_parallel_size=min(asked.stages, each * len(names)),
        layer_split=None,
        max_model_len=asked.max_model_len,
        kv_slots=asked.kv_slots,
        speculative_slots=asked.speculative_slots,
    )
    return resolve_options(options, living)
