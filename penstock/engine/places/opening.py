"""Opens the hosts of an engine's stages: this host, or those that its options name."""

from __future__ import annotations

import logging
from collections.abc import Generator, Mapping
from dataclasses import replace
from typing import Final

from penstock.core import ConfigError
from penstock.dtypes import DTYPE_BYTES
from penstock.engine.options import EngineOptions
from penstock.engine.places.footprint import kept_for_sharing, needed_bytes
from penstock.engine.places.on_ray import open_on_ray
from penstock.engine.places.planned import planned
from penstock.engine.profile.stages import with_prefill_times
from penstock.engine.resolve import Resolved, resolve_options
from penstock.hosts.facts import HostFacts, own_facts
from penstock.hosts.fleet import LOOK_S, Fleet
from penstock.hosts.host import FleetHost
from penstock.hosts.keys import security_for
from penstock.hosts.placement import HERE, AskedHosts, asked_hosts, check_memory, hosts_asked_for, in_gb, other_hosts
from penstock.pipeline.base import Host
from penstock.pipeline.processes import OnLoading, ProcessHost

log = logging.getLogger(__name__)

WORTH_TELLING: Final = 1 << 30
"""Bytes that prefix caching may cost before the log says so."""


def open_host(options: EngineOptions, on_loading: OnLoading | None = None) -> ProcessHost:
    """The host that runs the stages, attached to all that are named. Raises ConfigError for one that cannot be used."""
    assert not isinstance(options.cluster, str)
    names = other_hosts(hosts_asked_for(options.hosts, options.cluster))
    asked = AskedHosts(()) if options.hosts is None else asked_hosts(options.hosts)
    if not names and not asked.come:
        return ProcessHost(options.transport, options.stage_timeout, on_loading=on_loading)
    if options.insecure:
        log.warning(
            "insecure: what is asked and answered crosses the network as plain text, and whoever is there can join"
        )
    if asked.ray:
        return open_on_ray(options, asked.ray, on_loading)
    fleet = Fleet(names, security_for(options.keys, options.insecure), options.insecure, asked.door)
    try:
        if asked.door:
            fleet.wait_for(missing_hosts(options))
        return FleetHost(fleet, options.stage_timeout, on_loading)
    except BaseException:
        fleet.close()
        raise


def missing_hosts(options: EngineOptions) -> int:
    """How many hosts have to come: one for each stage, except for a stage on this host."""
    assert options.hosts is not None
    assert options.pipeline_parallel_size is not None
    return options.pipeline_parallel_size - (HERE in asked_hosts(options.hosts).names)


def resolve_on(options: EngineOptions, host: Host) -> Resolved:
    """Resolve options on the hosts that ``host`` reaches. Raises ConfigError for what one of them cannot do."""
    if not isinstance(host, FleetHost):
        setup = told(resolve_options(options))
        check_here(setup)
        return with_prefill_times(setup, {}, encrypted=False)
    fleet = host.fleet
    if options.hosts is not None and asked_hosts(options.hosts).come:
        options = replace(options, hosts=",".join(present(options.hosts, fleet)))
    options = planned(options, host)
    assert not isinstance(options.cluster, str)
    living = fleet.joined_by(other_hosts(hosts_asked_for(options.hosts, options.cluster)))
    setup = told(resolve_options(options, living))
    check_here(setup)
    for due in providing(setup, host, living):
        host.wait(due)
    return with_prefill_times(setup, living, encrypted=fleet.security is not None)


def told(setup: Resolved) -> Resolved:
    """Return ``setup``, and log a warning of memory or time that it takes and a user may not expect.

    Prefix caching may cost much that one long text would not need; weights that a file holds in whole numbers may be
    held as floats, where a processor does not compute in whole numbers; and a GPU makes floats of them at every step.
    """
    bits, options = setup.checkpoint.weights.bits, setup.options
    if (
        bits is not None
        and setup.quantization == "none"
        and (options.quantization == "auto" or options.device != "cpu")
    ):
        log.warning(
            "the file's weights of %d bits are held as %s on %s, which takes %s in all%s",
            bits,
            options.dtype,
            options.device,
            *size_in_floats(setup),
        )
    if setup.quantization != "none" and options.device != "cpu":
        log.warning(
            "weights held as %s become floats again at every step on %s: quantization none is many times as fast where "
            "its %s fit%s",
            setup.quantization,
            options.device,
            *size_in_floats(setup),
        )
    if setup.options.enable_prefix_caching and (kept := kept_for_sharing(setup)) > WORTH_TELLING:
        log.warning(
            "prefix caching has layers with a window or a state keep up to %.1f GiB that no later token reaches; "
            "enable_prefix_caching=False (--no-enable-prefix-caching) spares them",
            kept / 2**30,
        )
    return setup


def size_in_floats(setup: Resolved) -> tuple[str, str]:
    """The memory that all weights take as floats, and words for what takes less on a GPU, if anything does."""
    options = setup.options
    size = in_gb(DTYPE_BYTES[options.dtype] * sum(setup.checkpoint.weights.sizes().values()))
    halves = options.dtype == "float32" and options.device != "cpu"
    return size, "; dtype auto takes half of that" if halves else ""


def check_here(setup: Resolved) -> None:
    """Raise ConfigError if the stages on this host do not fit. Only before they start: free memory is what is left."""
    if "" in setup.hosts:
        here = own_facts("", gpus=any(device != "cpu" for device in setup.devices))
        check_memory(setup.hosts, setup.devices, needed_bytes(setup), {"": here})


def providing(setup: Resolved, host: FleetHost, living: Mapping[str, HostFacts]) -> Generator[float]:
    """Have every host of a setup hold the layers of its stages. Yields times at which to go on, until all do.

    ``living``: facts of the hosts for which the setup was made. Raises ConfigError for a host that cannot hold them and
    for files that cannot be read, and CheckpointChanged.
    """
    check_memory(setup.hosts, setup.devices, needed_bytes(setup), living)
    layers = layers_by_host(setup)
    try:
        host.fleet.ask(host.offer(setup.checkpoint.source, setup.checkpoint.num_layers), layers)
    except OSError as error:
        raise ConfigError(f"model: {setup.checkpoint.source} cannot be read: {error}") from error
    while not host.fleet.settled(layers):
        host.fleet.tell_progress()
        yield host.now() + LOOK_S
    host.fleet.tell_progress()
    host.fleet.check(layers)


def present(hosts: str, fleet: Fleet) -> list[str]:
    """The hosts that are named, then those that have come."""
    named = asked_hosts(hosts).names
    return [*named, *(name for name in fleet.hosts if name not in named)]


def layers_by_host(setup: Resolved) -> dict[str, list[tuple[int, int]]]:
    """The layers [first, last) of the stages on each of the other hosts, by host name."""
    found: dict[str, list[tuple[int, int]]] = {}
    for name, layers in zip(setup.hosts, setup.layers, strict=True):
        if name:
            found.setdefault(name, []).append(layers)
    return found
