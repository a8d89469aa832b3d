"""A cluster: devices, the links between them, and where each stage, the drafter and the engine run.

These are the checked, resolved types; ``load.py`` makes them from a TOML file, a preset, a seed or ``local-N``.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise, product
from typing import Final

from penstock.cluster.measured import LayerTimes
from penstock.cluster.prices import ModelPrice
from penstock.config import FieldError, check, check_positive

KV_SLOTS: Final = 4096


@dataclass(frozen=True, kw_only=True)
class DeviceKind:
    """Numbers that devices of one kind share. All but the first two are for emulated devices. Raises FieldError."""

    memory_gb: float | None = None
    """Memory for weights and cache, in 1e9 bytes; None: unknown, and not checked."""
    threads: int | None = None
    """Threads that compute on a real device; None: an equal part of the cores of its host."""
    weight_bandwidth_gb_s: float | None = None
    """Effective rate at which a pass reads weights, in 1e9 bytes/s."""
    compute_tflops: float | None = None
    """Effective rate of a pass over many rows, in 1e12 operations/s."""
    overhead_ms: float | None = None
    """Fixed time per batch, in milliseconds."""
    pass_ms: float | None = None
    """Measured milliseconds of a pass over a batch, in place of weight_bandwidth_gb_s and overhead_ms."""

    def __post_init__(self) -> None:
        check_positive(self, "memory_gb", "weight_bandwidth_gb_s", "compute_tflops", "pass_ms")
        check_positive(self, "overhead_ms", or_zero=True)
        check(self.threads is None or self.threads >= 1, "threads", self.threads, "at least 1")


@dataclass(frozen=True, kw_only=True)
class Device(DeviceKind):
    """One device. Numbers that it does not state itself come from its ``kind`` in the file's table of kinds."""

    name: str
    host: str = "localhost"
    kind: str | None = None
    measured: LayerTimes | None = None
    """Measured times of ``as_model``'s layers on it; the other numbers price other models there."""

    @property
    def priced(self) -> bool:
        """Whether every number that emulation needs is there."""
        made_of = (self.weight_bandwidth_gb_s, self.overhead_ms)
        return self.compute_tflops is not None and (self.pass_ms is not None or None not in made_of)


@dataclass(frozen=True, kw_only=True)
class Link:
    """A link between two devices: rate in 1e9 bits/s of payload, and milliseconds until the first byte arrives."""

    bandwidth_gbit_s: float
    latency_ms: float

    def __post_init__(self) -> None:
        check_positive(self, "bandwidth_gbit_s")
        check_positive(self, "latency_ms", or_zero=True)


@dataclass(frozen=True, kw_only=True)
class LinkBetween(Link):
    """A link that differs from the default: ``ends`` are two names of devices or hosts; it serves both directions."""

    ends: tuple[str, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        check(len(self.ends) == 2, "ends", list(self.ends), "two names of devices or hosts")


@dataclass(frozen=True, kw_only=True)
class Links:
    """``local`` joins devices of one host, ``network`` those of different hosts, unless ``between`` names them."""

    local: Link | None = None
    network: Link | None = None
    between: tuple[LinkBetween, ...] = ()
    exclusive: bool = False
    """Whether a device sends or receives hidden states of one batch at a time (PipeDec, algorithms 2 and 3): a transfer
    begins when both its ends are free. For simulations only."""

    def find(self, one: Device, other: Device) -> Link:
        """The link of two different devices; a device's name wins over its host's. Raises FieldError for none."""
        named = {frozenset(link.ends): link for link in self.between}
        for ends in product((one.name, one.host), (other.name, other.host)):  # names before hosts
            if frozenset(ends) in named:
                return named[frozenset(ends)]
        field, link = ("local", self.local) if one.host == other.host else ("network", self.network)
        if link is None:
            raise FieldError(f"links.{field}", f"is missing: {one.name!r} and {other.name!r} have to be joined")
        return link


@dataclass(frozen=True, kw_only=True)
class Stage:
    """The devices that hold a stage, in order; a stage takes one batch at a time (PipeDec's groups).

    ``layers`` is how many of ``as_model``'s layers each device is priced with; empty where nothing is emulated.
    """

    devices: tuple[str, ...]
    layers: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A valid cluster. ``load_cluster`` makes it; every name in it is that of a device in ``devices``."""

    name: str
    description: str = ""
    devices: tuple[Device, ...]
    links: Links
    stages: tuple[Stage, ...]
    engine: str
    drafter: str | None = None
    as_model: ModelPrice | None = None
    """Emulation: the model that the stages are priced as. None means that nothing is emulated."""
    draft_as_model: ModelPrice | None = None
    draft_pass_ms: float | None = None
    """Measured milliseconds of one of the drafter's passes, on any device; None: priced by ``draft_as_model``."""
    time_scale: float = 1.0
    """Factor on every modelled time."""
    kv_slots: int = KV_SLOTS
    """Tokens whose keys and values every stage has to have room for."""

    @property
    def emulated(self) -> bool:
        return self.as_model is not None

    def device(self, name: str) -> Device:
        return next(device for device in self.devices if device.name == name)

    def link(self, one: str, other: str) -> Link | None:
        """The link between two devices; None between a device and itself."""
        return None if one == other else self.links.find(self.device(one), self.device(other))

    @property
    def drafting_stage(self) -> int | None:
        """The stage with which the drafter shares a device; None where it has one of its own, or the engine's."""
        return next((i for i, stage in enumerate(self.stages) if self.drafter in stage.devices), None)

    def route(self) -> list[tuple[str, str]]:
        """The hops of a batch: engine to first stage, stage to stage, last stage to engine."""
        stops = [(stage.devices[0], stage.devices[-1]) for stage in self.stages]
        enters = [first for first, _ in stops] + [self.engine]
        leaves = [self.engine] + [last for _, last in stops]
        return list(zip(leaves, enters, strict=True))

    def hops(self) -> list[tuple[str, str]]:
        """Every pair of devices that exchange messages: the route, inside the stages, engine and drafter."""
        inside = [pair for stage in self.stages for pair in pairwise(stage.devices)]
        return self.route() + inside + ([(self.engine, self.drafter)] if self.drafter else [])
