"""The devices that a model may be split over, and the times of its layers there."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from penstock.cluster.measured import LayerTimes
from penstock.cluster.prices import ModelPrice
from penstock.config import FieldError
from penstock.core import ConfigError
from penstock.engine.build import stage_plans
from penstock.engine.options import EngineOptions
from penstock.engine.places.footprint import needed_bytes
from penstock.engine.profile.digest import digest_of
from penstock.engine.profile.measure import OnStep, contexts_within, measured_times, parts_of
from penstock.engine.profile.price import price_of
from penstock.engine.profile.store import DeviceKey, DeviceProfile, ProfileStore
from penstock.engine.resolve import Resolved, resolve_options
from penstock.hosts.facts import HostFacts, own_facts
from penstock.hosts.host import FleetHost
from penstock.hosts.placement import HERE, device_on, in_gb, in_plans
from penstock.pipeline.base import Host

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Candidate:
    """A host's device, with the whole model as it would be held there."""

    name: str
    """The host's name."""
    beside: tuple[str, ...]
    """The devices of the host that are candidates, this one among them."""
    facts: HostFacts
    setup: Resolved
    key: DeviceKey

    @property
    def device(self) -> str:
        return self.setup.devices[0]

    @property
    def label(self) -> str:
        """The candidate's own name: the host's, with the device where the host has several candidates."""
        return self.name if len(self.beside) == 1 else f"{self.name}/{self.device}"

    @property
    def free(self) -> int | None:
        """Free bytes of the device's memory; None if the host does not say.

        Of several GPUs that of the fullest: a plan that has stages on some of them does not say on which.
        """
        found = [self.facts.device(device) for device in self.beside]
        free = [one.free for one in found if one is not None and one.free is not None]
        return min(free) if len(free) == len(self.beside) else None


@dataclass(frozen=True)
class Candidates:
    """Devices by their labels, in the order in which hosts are named, and the model's price list."""

    devices: dict[str, Candidate]
    price: ModelPrice

    @property
    def names(self) -> list[str]:
        return list(self.devices)

    @property
    def hosts(self) -> list[str]:
        """The host of each."""
        return [one.name for one in self.devices.values()]

    @property
    def capacity(self) -> int:
        """Tokens that every stage has room for."""
        return next(iter(self.devices.values())).setup.kv_slots


def candidates_on(options: EngineOptions, names: list[str], living: Mapping[str, HostFacts]) -> Candidates:
    """The devices that the options ask for: one on each host, or a GPU for each time that it is named.

    Raises ConfigError for a host with none, for one with several GPUs that is named once, and for GPUs of a host that
    differ.
    """
    from penstock.models.devices import check_device

    # As one stage, whose formats are those that the engine would resolve for all of these hosts.
    alone = replace(
        options,
        hosts=None if names == [HERE] else ",".join(names),
        cluster=None,
        layer_split=None,
        pipeline_parallel_size=1,
        speculative_config=None,
    )
    whole = resolve_options(alone, living)
    digest = digest_of(whole.checkpoint.source)
    found: dict[str, Candidate] = {}
    named, hosts = Counter[str](), {name: own_facts("") if name == HERE else living[name] for name in names}
    asked = {name: asked_devices(name, hosts[name], options.device, names.count(name)) for name in hosts}
    for name in names:
        facts, device = hosts[name], asked[name][named[name]]
        named[name] += 1
        if name == HERE:
            check_device(device)
        threads = options.threads or (facts.cores if device == "cpu" else 1)
        setup = replace(
            whole, hosts=(in_plans(name),), devices=(device,) * 2, threads=(threads,) * 2, speculative_slots=0
        )
        candidate = Candidate(name, asked[name], facts, setup, key_of(name, facts, setup, digest))
        found[candidate.label] = candidate
    return Candidates(found, price_of(whole))


def asked_devices(name: str, facts: HostFacts, device: str, times: int) -> tuple[str, ...]:
    """The devices of a host that is named so many times."""
    if times == 1 and device == "cuda" and len(facts.gpus) > 1:
        raise FieldError(
            "layer_split",
            f"plans one device for each time that a host is named, and {name} has {len(facts.gpus)} GPUs: name it as "
            f"often (hosts {','.join([name] * len(facts.gpus))}), name a GPU with device, or state the layers",
        )
    found = tuple(device_on(name, facts, device, place, times) for place in range(times))
    models = {known.model for one in found if (known := facts.device(one)) is not None}
    if len(models) > 1:  # which of them a stage gets is not planned
        raise FieldError(
            "layer_split",
            f"plans for GPUs of a host that are alike, and {name} has {' and '.join(sorted(models))}: run a worker for "
            "each, with its own CUDA_VISIBLE_DEVICES and port, or state the layers",
        )
    return found


def key_of(name: str, facts: HostFacts, setup: Resolved, digest: str, stage: int = 0) -> DeviceKey:
    """The key of a stage's times: everything that they depend on. ``digest`` is the checkpoint's."""
    device = setup.devices[stage]
    found = facts.device(device)
    return DeviceKey(
        host=name,
        node=facts.name,
        device=device,
        device_model="" if found is None else found.model,
        threads=setup.threads[stage],
        model=digest,
        dtype=setup.options.dtype,
        quantization=setup.quantization,
        numerics=setup.options.numerics,
        penstock=facts.versions.penstock,
        torch=facts.versions.torch,
    )


def profiled(
    candidate: Candidate, host: Host, store: ProfileStore, on_step: OnStep, tokens: Sequence[int] = ()
) -> LayerTimes:
    """Measure a candidate's layers and store the times. Raises ConfigError for too little memory, and PipelineError."""
    contexts = contexts_within(candidate.setup.max_model_len)
    setup = in_parts(candidate)
    if isinstance(host, FleetHost) and candidate.name != HERE:
        offer = host.offer(setup.checkpoint.source, setup.checkpoint.num_layers)
        host.fleet.provide(offer, {candidate.name: setup.layers})
    times = measured_times(host, stage_plans(setup), contexts, on_step, tokens)
    store.keep(DeviceProfile(key=candidate.key, times=times))
    return times


def in_parts(candidate: Candidate) -> Resolved:
    """The four stages that are measured, with as many layers as there is memory for."""
    whole = candidate.setup
    layers = whole.checkpoint.num_layers

    def parted(most: int) -> Resolved:
        parts = parts_of(layers, most)
        return replace(
            whole,
            layers=parts,
            hosts=whole.hosts * len(parts),
            devices=(candidate.device,) * (len(parts) + 1),
            threads=(whole.threads[0],) * (len(parts) + 1),
        )

    if candidate.free is None:
        return parted(layers)
    first, one, _, last = needed_bytes(parted(1))
    left = candidate.free - first - one - last
    if left < one:
        problem = f"host {candidate.name}: {candidate.device} has {in_gb(candidate.free)} free, and four layers with"
        raise ConfigError(f"{problem} the embedding and the head take {in_gb(first + 2 * one + last)}")
    return parted(int(0.8 * left / one))
