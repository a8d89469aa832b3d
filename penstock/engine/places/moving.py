"""Where stages go when their hosts are lost, and when hosts are back."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from penstock.core import ConfigError, PipelineError
from penstock.engine.places.footprint import needed_bytes
from penstock.engine.places.opening import present, provided
from penstock.engine.resolve import Resolved, devices_of, resolve_options, threads_of
from penstock.hosts.fleet import Fleet
from penstock.hosts.host import FleetHost
from penstock.hosts.placement import HERE, in_plans, moved, room
from penstock.pipeline.base import Host

log = logging.getLogger(__name__)


def resolve_again(asked: Resolved, host: Host) -> Resolved:
    """What was asked for, on the hosts that are there now.

    Each stage stays on its host as long as that is there: it keeps its weights. The others go to spares, or to hosts
    that have stages already. Where they have no room, all layers are split anew, into no more stages than before.
    Raises PipelineError where that cannot be, as long as it cannot.
    """
    if not isinstance(host, FleetHost):
        return asked
    names = names_there(asked, host.fleet)
    if asked.options.hosts is None:  # a cluster file's stages have their places
        if missing := [name for name in asked.hosts if name not in names]:
            raise PipelineError(f"host {missing[0]} is not there")
        return asked
    if not names:
        raise PipelineError("none of the hosts is there")
    try:
        try:
            return provided(same_split(asked, names, host.fleet), host.fleet)
        except ConfigError as error:
            log.warning("%s; its layers are split anew", error)
            return provided(split_anew(asked, names, host.fleet), host.fleet)
    except ConfigError as error:
        raise PipelineError(str(error)) from error


def names_there(asked: Resolved, fleet: Fleet) -> list[str]:
    """The hosts that stages may be on now, as plans name them."""
    living = fleet.living
    if asked.options.hosts is None:
        return ["", *living]
    return [in_plans(name) for name in present(asked.options.hosts, fleet) if not in_plans(name) or name in living]


def spares_idle(asked: Resolved, running: Resolved, host: Host) -> bool:
    """Whether stages share a host that were on several, while another one that has none is there."""
    if not isinstance(host, FleetHost) or running is asked:
        return False
    used = len(set(running.hosts))
    return used < min(len(set(asked.hosts)), len(names_there(asked, host.fleet)))


def same_split(asked: Resolved, names: Sequence[str], fleet: Fleet) -> Resolved:
    """The same stages. Raises ConfigError where one fits nowhere."""
    living, needed, options = fleet.living, needed_bytes(asked), asked.options

    def has_room(name: str, stages: Sequence[int]) -> bool:
        wanted = sum(needed[stage] for stage in stages)
        return not name or (name in living and wanted <= room(living[name], options.device))

    hosts = moved(asked.hosts, names, has_room)
    drafts = asked.draft is not None or asked.speculator is not None
    return replace(
        asked,
        hosts=hosts,
        devices=devices_of(options, hosts, living),
        threads=threads_of(options, asked.cluster, hosts, living, drafts=drafts),
    )


def split_anew(asked: Resolved, names: Sequence[str], fleet: Fleet) -> Resolved:
    """Even stages, no more on a host than were asked for. Raises ConfigError where that cannot be."""
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
    return resolve_options(options, fleet.living)
