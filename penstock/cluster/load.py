"""Loads cluster files and presets, gives devices their layers, and turns measured passes into rates."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import Any, Final

from penstock.cluster.drawn import drawn_table
from penstock.cluster.spec import (
    HERE,
    KV_SLOTS,
    LAYERS,
    PRICES,
    SPLITS,
    TENSORS,
    Cluster,
    Device,
    DeviceKind,
    LinkBetween,
    Links,
    ModelPrice,
    Stage,
    parts_of,
)
from penstock.cluster.timing import check_divisible, check_memory, held_by_part, part_timing
from penstock.config import FieldError, check, check_positive, known_name, nearest, parse, read_toml
from penstock.core import ConfigError

# --------------------------------------------------------------------------------------------------------------- layers
# Gives each device of a cluster file the layers that it is priced with: as stages state them, or by devices' speed.

PRICED_BY: Final = "weight_bandwidth_gb_s, compute_tflops and overhead_ms"
"""The fields that price an emulated device, as error messages name them."""


@dataclass(frozen=True, kw_only=True)
class StageEntry:
    """A stage of a cluster file. ``layers``: the number of the whole stage, spread evenly, or one for each device.

    ``split``: "layers", where devices follow each other, or "tensors", where they are the ranks of a tensor parallel
    group and ``layers`` is one number. Raises FieldError for no devices and for another split.
    """

    devices: tuple[str, ...]
    layers: int | tuple[int, ...] | None = None
    split: str = LAYERS

    def __post_init__(self) -> None:
        check(bool(self.devices), "devices", [], "a list of at least one device")
        known_name(self.split, SPLITS, "split")

    @property
    def parts(self) -> list[tuple[str, ...]]:
        """The devices that are given layers together: each by itself, or all ranks of a group."""
        return [self.devices] if self.split == TENSORS else [(name,) for name in self.devices]


def stages_with_layers(entries: tuple[StageEntry, ...], cluster: Cluster) -> tuple[Stage, ...]:
    """The stages with their devices' layers: as every stage states them, else by speed, or evenly for equal devices.

    Raises FieldError if only some stages state layers, if the numbers do not add up to the model's, or if nothing is
    emulated and some are stated.
    """
    model = cluster.as_model
    stated = [i for i, entry in enumerate(entries) if entry.layers is not None]
    if model is None:
        if stated:
            problem = "prices an emulated stage, and as_model is missing; to split a real model use layer_split"
            raise FieldError(f"stages[{stated[0]}].layers", problem)
        return tuple(Stage(devices=entry.devices, split=entry.split) for entry in entries)
    check_groups(entries, cluster, model)
    if not stated:
        counts = iter(unstated_layers([part for entry in entries for part in entry.parts], cluster, model))
        return tuple(
            Stage(devices=entry.devices, layers=tuple(next(counts) for _ in entry.parts), split=entry.split)
            for entry in entries
        )
    if len(stated) < len(entries):
        missing = next(i for i in range(len(entries)) if i not in stated)
        raise FieldError(f"stages[{missing}].layers", "is missing: state the layers of every stage or of none")
    stages = tuple(
        Stage(devices=entry.devices, layers=device_layers(i, entry), split=entry.split)
        for i, entry in enumerate(entries)
    )
    total = sum(sum(stage.layers) for stage in stages)
    if total != model.layers:
        raise FieldError("stages", f"hold {total} layers together; as_model has {model.layers}")
    return stages


def check_groups(entries: Sequence[StageEntry], cluster: Cluster, model: ModelPrice) -> None:
    """Raise FieldError for a tensor parallel stage whose ranks cannot share the layers, or are not joined or priced."""
    for i, entry in enumerate(entries):
        if entry.split != TENSORS:
            continue
        check_divisible(model, len(entry.devices), f"stages[{i}].devices")
        for device in map(cluster.device, entry.devices):
            at = f"devices[{cluster.devices.index(device)}]"
            for name in ("pass_ms", "measured"):
                if getattr(device, name) is not None:
                    problem = f"holds for whole layers, and {device.name!r} has shares of them in stages[{i}]"
                    raise FieldError(f"{at}.{name}", f"{problem}; state {PRICED_BY} instead")
            check_priced(at, device)
        for one, other in combinations(entry.devices, 2):
            cluster.link(one, other)  # raises if it is missing


def unstated_layers(parts: Sequence[Sequence[str]], cluster: Cluster, model: ModelPrice) -> Sequence[int]:
    """Layers of each part, a device or a tensor parallel group, in order, where no stage states any.

    Parts that differ get them by speed. Equal ones get equal numbers; a remainder goes to the first ones, since the
    last one holds the head, too. Raises FieldError if there are more parts than layers.
    """
    if len(parts) > model.layers:
        what = "devices" if all(len(part) == 1 for part in parts) else "devices and groups"
        problem = f"name {len(parts)} {what} for the {model.layers} layers of as_model; use fewer"
        raise FieldError("stages", problem)
    devices = [[cluster.device(name) for name in part] for part in parts]
    # Names, hosts and kinds say nothing of a device's speed.
    kinds = {tuple(dataclasses.replace(device, name="", host="", kind=None) for device in part) for part in devices}
    if len(kinds) > 1 and all(device.priced for part in devices for device in part):
        return layers_by_speed(devices, cluster, model)
    return spread(model.layers, len(parts))


def layers_by_speed(parts: Sequence[Sequence[Device]], cluster: Cluster, model: ModelPrice) -> list[int]:
    """Layers of each part such that the slowest one is as fast as it can be.

    Each layer goes to the part that would be done first with it. A part whose memory is full gets no more, unless all
    are full. Where layers differ, a part is weighed with the layers that it would have if no more went to the parts
    before it.
    """

    def after(i: int) -> tuple[bool, float]:
        """Whether part ``i`` would be full with one more layer, and its seconds for one row with it."""
        begin = sum(counts[:i])
        devices, layers, head = parts[i], range(begin, begin + counts[i] + 1), i == len(parts) - 1
        each = held_by_part(model, devices, layers, cluster.kv_slots, embedding=i == 0, head=head)
        # Prices are those of one rank's share where the part is a group, so that each device is held to its own.
        full = any(
            device.memory_gb is not None and held.total > device.memory_gb * 1e9
            for device, held in zip(devices, each, strict=True)
        )
        return full, part_timing(cluster, model, devices, layers, head=head).seconds(1)

    counts = [1] * len(parts)
    for _ in range(model.layers - len(parts)):
        counts[min(range(len(parts)), key=after)] += 1  # False sorts first: parts that have room
    return counts


def device_layers(index: int, entry: StageEntry) -> tuple[int, ...]:
    """The layers of each part of the stage ``index``, whose entry states them. Raises FieldError for a wrong number."""
    where, devices, layers = f"stages[{index}].layers", len(entry.devices), entry.layers
    if entry.split == TENSORS:
        counts = (layers,) if isinstance(layers, int) else tuple(layers or ())
        # A file that `penstock plan` wrote has a list of one number.
        check(len(counts) == 1, where, list(counts), "one number: each of its ranks has a share of all its layers")
        check(counts[0] >= 1, where, counts[0], "at least 1")
        return counts
    if isinstance(layers, int):
        check(layers >= devices, where, layers, f"at least 1 for each of its {devices} devices")
        return spread(layers, devices)
    assert layers is not None
    check(len(layers) == devices, where, list(layers), f"a number, or one for each of its {devices} devices")
    check(min(layers) >= 1, where, list(layers), "at least 1 everywhere")
    return layers


def spread(layers: int, devices: int) -> tuple[int, ...]:
    """``layers`` spread evenly over so many devices; the first ones have one more where there is a remainder."""
    each, left = divmod(layers, devices)
    return tuple(each + (i < left) for i in range(devices))


# --------------------------------------------------------------------------------------------------------------- passes
# Turns the measured pass of a device into a rate, so that other layers than those measured can be priced on it.


def with_rates(cluster: Cluster, stages: tuple[Stage, ...], model: ModelPrice) -> Cluster:
    """Replace every device's ``pass_ms`` by a memory bandwidth, so that other layers can be priced on it.

    The bandwidth is the bytes of the weights of the device's layers in ``stages``, over its ``pass_ms``; a pass is thus
    assumed to take time in proportion to its weights. A device without layers gets the bandwidth of a device of the
    same kind, and is left unchanged if there is none.
    """
    last = stages[-1].last_device
    rates: dict[str, float] = {}
    # Devices of one kind may hold different layers; the first that is met stands for those without layers.
    by_kind: dict[str, float] = {}
    for parts in parts_of(stages):
        for (name, *_), layers in parts:
            device = cluster.device(name)
            if device.pass_ms is not None:  # no rank of a group has one (check_groups)
                # Bytes per millisecond are 1e-6 times 1e9 bytes/s.
                rates[name] = model.weight_bytes(layers, head=name == last) / device.pass_ms / 1e6
                by_kind.setdefault(device.kind or name, rates[name])
    return replace(
        cluster,
        devices=tuple(
            with_rate(one, rates.get(one.name, by_kind.get(one.kind or one.name))) for one in cluster.devices
        ),
    )


def with_rate(device: Device, gb_s: float | None) -> Device:
    """The device with a rate of ``gb_s`` (1e9 bytes/s) in place of its pass, if it states one."""
    if device.pass_ms is None or gb_s is None:
        return device
    # The pass as measured has the overhead in it, and so has the rate.
    return replace(device, pass_ms=None, weight_bandwidth_gb_s=gb_s, overhead_ms=0.0)


# ----------------------------------------------------------------------------------------------------------------- load
# Makes a checked Cluster from a cluster file, a preset's name, ``local-N`` or ``random-SEED``.
#
# The file, with everything optional in brackets::
#
#     name = "two-boxes"
#     [description, as_model, draft_as_model, draft_pass_ms, engine, drafter, time_scale, kv_slots]
#     devices = [{ name = "a1", host = "a", kind = "rtx3090" }, ...]     # or the kind's numbers on the device itself
#     stages = [{ devices = ["a1"], layers = 4 }, { devices = ["a2", "b1"], layers = [6, 6] },
#               { devices = ["b2", "b3"], layers = 8, split = "tensors" }, ...]       # split is "layers" by default
#
#     [kinds.rtx3090]            # memory_gb, weight_bandwidth_gb_s, compute_tflops, overhead_ms; or, measured, pass_ms
#                                # of real devices: memory_gb, threads
#     [links.local]              # bandwidth_gbit_s, latency_ms: between devices of one host
#     [links.network]            # between hosts
#     [[links.between]]          # exceptions: ends = ["a", "b1"], bandwidth_gbit_s, latency_ms

DRAFTER_ON: Final = "drafter_on"
"""The argument of ``load_cluster`` that errors about the drafter's device name."""
ON_ENGINE, ON_FIRST, ON_LAST = "engine", "first-stage", "last-stage"
"""Where a drafter may be without a device's name: beside the engine, or with the first or the last stage."""
PRESETS: Final = Path(__file__).parent / "presets"
"""The folder of the cluster files that may be loaded by name."""
MOST_LOCAL: Final = 1024
"""Most stages of ``local-N``: several times the layers of the deepest models."""
MOST_DIGITS: Final = 18
"""Most digits of a number in a cluster's name."""


@dataclass(frozen=True, kw_only=True)
class ClusterFile:
    """A cluster file as written. Fields that have the name of a field of ``Cluster`` mean the same."""

    name: str
    description: str = ""
    as_model: str | ModelPrice | None = None
    draft_as_model: str | ModelPrice | None = None
    engine: str | None = None
    """Default: the drafter's device, else the first stage's."""
    drafter: str | None = None
    draft_pass_ms: float | None = None
    time_scale: float = 1.0
    kv_slots: int = KV_SLOTS
    kinds: dict[str, DeviceKind] = field(default_factory=dict)
    devices: tuple[Device, ...]
    stages: tuple[StageEntry, ...] = ()
    links: Links = field(default_factory=Links)

    def __post_init__(self) -> None:
        check_positive(self, "time_scale", "draft_pass_ms", "kv_slots")
        wanted = "a list of at least one stage; `penstock plan -o plan.toml` chooses them for the devices"
        check(bool(self.stages), "stages", [], wanted)


def load_cluster(
    name_or_path: str, *, bandwidth_gbit_s: float | None = None, drafter_on: str | None = None, **overrides: Any
) -> Cluster:
    """Load a preset, a path that ends in ``.toml``, ``local-N`` or ``random-SEED``.

    ``local-N``: N stages on this host, nothing emulated. ``random-17`` or ``random-17:32``: ``random_cluster``.
    ``bandwidth_gbit_s``: rate of every link between different hosts, in place of the file's, in 1e9 bits/s of payload.
    ``drafter_on``: place of the drafter instead of the file's device (``with_drafter_on``).
    ``overrides`` replace fields of the file, tables key by key: ``time_scale=2.0`` or
    ``links={"network": {"latency_ms": 1}}``. Raises ConfigError that names the source and the field.
    """
    try:
        cluster = resolve(parse(ClusterFile, merged(read_cluster(name_or_path), overrides)))
        cluster = cluster if bandwidth_gbit_s is None else with_network_bandwidth(cluster, bandwidth_gbit_s)
        return cluster if drafter_on is None else with_drafter_on(cluster, drafter_on)
    except FieldError as error:
        raise ConfigError(f"cluster {name_or_path}: {error}") from None


def load_devices(
    name_or_path: str, *, as_model: str | None = None, bandwidth_gbit_s: float | None = None, **overrides: Any
) -> Cluster:
    """A cluster to plan for: loaded as by ``load_cluster``, but its stages hold no layers, and the file may have none.

    A file without stages gets one for each device that is neither the drafter's nor the engine's. ``as_model`` replaces
    the file's. A measured pass becomes a rate, by the layers that the file gives its stage. Raises ConfigError, also if
    nothing is emulated.
    """
    try:
        table = merged(read_cluster(name_or_path), overrides)
        staged = "stages" in table
        table.setdefault("stages", own_stages(table))
        file = parse(ClusterFile, table)
        check_names(file)
        own = price("as_model", file.as_model)
        model = own if as_model is None else price("as_model", as_model)
        if model is None:
            raise FieldError("as_model", "is None; it has to be named: the model whose layers are to be placed")
        cluster = cluster_of(file, model, tuple(Stage(devices=entry.devices) for entry in file.stages))
        check_numbers(cluster)
        # A pass was measured with the file's own model, whatever model is planned for.
        if staged and any(device.pass_ms is not None for device in cluster.devices):
            held = stages_with_layers(file.stages, dataclasses.replace(cluster, as_model=own or model))
            cluster = with_rates(cluster, held, own or model)
        return cluster if bandwidth_gbit_s is None else with_network_bandwidth(cluster, bandwidth_gbit_s)
    except FieldError as error:
        raise ConfigError(f"cluster {name_or_path}: {error}") from None


def own_stages(table: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A stage for each device of a file's table that is neither its drafter nor its engine."""
    busy, devices = {table.get("drafter"), table.get("engine")}, table.get("devices")
    names = [one.get("name") for one in devices if isinstance(one, Mapping)] if isinstance(devices, list) else []
    return [{"devices": [name]} for name in names if name not in busy]


def random_cluster(seed: int, stages: int | None = None) -> Cluster:
    """An emulated cluster drawn from a seed, the same on every platform, with a model and a drafter (``drawn.py``).

    ``stages``: 2 to 128; None draws them too. Raises FieldError for a number of stages or a seed out of range.
    """
    return resolve(parse(ClusterFile, drawn_table(seed, stages)))


def preset_names() -> list[str]:
    """The names that ``load_cluster`` knows without a path, ``local-N`` and ``random-SEED`` aside."""
    return sorted(path.stem for path in PRESETS.glob("*.toml"))


def read_cluster(name_or_path: str) -> dict[str, Any]:
    """The table of the file that the name or path means. Raises ConfigError for an unknown name or a faulty file."""
    if name_or_path.endswith(".toml"):
        return read_toml(Path(name_or_path))
    if local := re.fullmatch(r"local-([1-9]\d*)", name_or_path):
        return local_table(small_number("stages", local[1]))
    if drawn := re.fullmatch(r"random-(0|[1-9]\d*)(?::(0|[1-9]\d*))?", name_or_path):
        stages = small_number("stages", drawn[2]) if drawn[2] else None
        return drawn_table(small_number("seed", drawn[1]), stages)
    if name_or_path not in preset_names():
        known = nearest(name_or_path, [*preset_names(), "random-SEED", "local-N"])
        raise ConfigError(f"cluster {name_or_path!r} is unknown; {known}, or a path that ends in .toml")
    return read_toml(PRESETS / f"{name_or_path}.toml")


def small_number(name: str, digits: str) -> int:
    """The number in a cluster's name. Raises FieldError for more digits than any number there may have."""
    if len(digits) > MOST_DIGITS:
        raise FieldError(name, f"has {len(digits):,} digits; it may have {MOST_DIGITS}")
    return int(digits)


def local_table(stages: int) -> dict[str, Any]:
    """The table of a cluster of so many stages, and devices, on this host. Raises FieldError for too many."""
    check(stages <= MOST_LOCAL, "stages", stages, f"at most {MOST_LOCAL}: a stage is a process")
    names = [f"stage-{i}" for i in range(1, stages + 1)]
    return {
        "name": f"local-{stages}",
        "description": f"{stages} stages on this host",
        "devices": [{"name": name} for name in names],
        "stages": [{"devices": [name]} for name in names],
    }


def merged(table: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The table with ``overrides`` on top; a table inside a table is merged likewise, any other value replaced."""
    result = dict(table)
    for key, value in overrides.items():
        inner = result.get(key)
        if isinstance(inner, Mapping) and isinstance(value, Mapping):
            value = merged(inner, value)
        result[key] = value
    return result


def with_network_bandwidth(cluster: Cluster, gbit_s: float) -> Cluster:
    """The cluster with another rate on every link between different hosts. Raises FieldError if there is none."""
    where, hosts = "bandwidth_gbit_s", {device.host for device in cluster.devices}
    check(math.isfinite(gbit_s) and gbit_s > 0, where, gbit_s, "above 0")
    check(cluster.emulated, where, gbit_s, "left out: no as_model, so there are no modelled links")
    check(len(hosts) > 1, where, gbit_s, f"left out: all devices are on one host, {cluster.devices[0].host!r}")
    network, between = cluster.links.network, cluster.links.between
    links = dataclasses.replace(
        cluster.links,
        network=network and dataclasses.replace(network, bandwidth_gbit_s=gbit_s),
        between=tuple(
            dataclasses.replace(link, bandwidth_gbit_s=gbit_s) if joins_hosts(link, cluster.devices) else link
            for link in between
        ),
    )
    return dataclasses.replace(cluster, links=links)


def joins_hosts(link: LinkBetween, devices: tuple[Device, ...]) -> bool:
    """Whether a link's ends, each the name of a device or of a host, are on different hosts."""
    return len({device.host for device in devices for end in link.ends if end in (device.name, device.host)}) > 1


def with_drafter_on(cluster: Cluster, place: str) -> Cluster:
    """The cluster with the drafter on "engine", "first-stage", "last-stage", or the device of that name.

    The engine stays. Raises FieldError for an unknown device and, where devices are emulated, if nothing drafts or the
    device cannot hold the drafter.
    """
    known: dict[str, str | None] = {
        ON_ENGINE: cluster.engine if cluster.emulated else None,  # a real engine is where its command is started
        ON_FIRST: cluster.stages[0].devices[0],
        ON_LAST: cluster.stages[-1].last_device,
    }
    known |= {device.name: device.name for device in cluster.devices}
    if place not in known:
        raise FieldError(DRAFTER_ON, f"is {place!r}, which is no device; {nearest(place, known)}")
    drafts = not cluster.emulated or cluster.drafter is not None
    check(drafts, DRAFTER_ON, place, "left out: the cluster names no drafter that could be moved")
    moved = dataclasses.replace(cluster, drafter=known[place])
    if moved.as_model is not None:
        check_emulated(moved, moved.as_model)
    return moved


def resolve(file: ClusterFile) -> Cluster:
    """The cluster that a file describes, defaults filled in and everything checked.

    Raises FieldError, naming the field, for names, layers, numbers or memory that do not go together.
    """
    check_names(file)
    as_model = price("as_model", file.as_model)
    cluster = cluster_of(file, as_model, ())  # without stages: their layers depend on the devices and the model
    cluster = dataclasses.replace(cluster, stages=stages_with_layers(file.stages, cluster))
    if cluster.as_model is not None:
        check_emulated(cluster, cluster.as_model)
    else:
        refuse_emulation(cluster)
        check_engine(file, cluster)
    return cluster


def check_engine(file: ClusterFile, cluster: Cluster) -> None:
    """Raise FieldError if a file of real devices places the engine on a host other than the one that loads the file."""
    host = cluster.device(cluster.engine).host
    if file.engine is not None and host != HERE:
        remedy = f"start the command there, or name a device whose host is {HERE!r}, or leave it out"
        raise FieldError("engine", f"is {file.engine!r}, on host {host}: the engine runs where it is started; {remedy}")


def cluster_of(file: ClusterFile, as_model: ModelPrice | None, stages: tuple[Stage, ...]) -> Cluster:
    """The file's cluster with ``stages``; nothing is checked but its devices' kinds."""
    return Cluster(
        name=file.name,
        description=file.description,
        devices=tuple(with_kind(i, device, file.kinds) for i, device in enumerate(file.devices)),
        links=file.links,
        stages=stages,
        engine=file.engine or file.drafter or file.stages[0].devices[0],
        drafter=file.drafter,
        as_model=as_model,
        draft_as_model=price("draft_as_model", file.draft_as_model),
        draft_pass_ms=file.draft_pass_ms,
        time_scale=file.time_scale,
        kv_slots=file.kv_slots,
    )


def price(where: str, model: str | ModelPrice | None) -> ModelPrice | None:
    """The prices of the model that a file names or holds, or None. Raises FieldError for an unknown name."""
    if isinstance(model, str):
        if model not in PRICES:
            raise FieldError(where, f"{model!r} is unknown; {nearest(model, PRICES)}, or a table of prices")
        return PRICES[model]
    return model


def with_kind(index: int, device: Device, kinds: Mapping[str, DeviceKind]) -> Device:
    """The device with its kind's numbers where it has none of its own. Raises FieldError for an unknown kind."""
    if device.kind is None:
        return device
    if device.kind not in kinds:
        raise FieldError(f"devices[{index}].kind", f"{device.kind!r} is unknown; {nearest(device.kind, kinds)}")
    shared = dataclasses.asdict(kinds[device.kind])
    return dataclasses.replace(device, **{key: n for key, n in shared.items() if getattr(device, key) is None})


# ------------------------------------------------------------------------------------------------------------ names
# Every name of a device or host that a file uses has to be defined once, and given at most one stage.


def check_names(file: ClusterFile) -> None:
    """Raise FieldError for a name that is defined or used twice, or used and not defined."""
    names = [device.name for device in file.devices]
    hosts = [device.host for device in file.devices]
    check_unambiguous(file.devices)
    taken: dict[str, str] = {}
    for where, name in uses(file):
        if name not in names:
            raise FieldError(where, f"names {name!r}, which is no device; {nearest(name, names)}")
        if name in taken and where not in ("engine", "drafter"):
            raise FieldError(where, f"uses {name!r}, which {taken[name]} uses already")
        taken[name] = where
    check_ends(file.links.between, list(dict.fromkeys(names + hosts)))


def check_unambiguous(devices: tuple[Device, ...]) -> None:
    """Raise FieldError for two devices of one name, or for one named like another's host: a link's end is either."""
    names = [device.name for device in devices]
    for i, device in enumerate(devices):
        if device.name in names[:i]:
            raise FieldError(f"devices[{i}].name", f"{device.name!r} is the name of an earlier device")
        if any(device.name == other.host and other is not device for other in devices):
            raise FieldError(f"devices[{i}].name", f"{device.name!r} is the name of another device's host")


def check_ends(links: tuple[LinkBetween, ...], known: list[str]) -> None:
    """Raise FieldError for a link whose ends do not exist, or whose ends an earlier link has already."""
    for i, link in enumerate(links):
        for j, end in enumerate(link.ends):
            if end not in known:
                problem = f"names {end!r}, no device or host; {nearest(end, known)}"
                raise FieldError(f"links.between[{i}].ends[{j}]", problem)
        if any(set(link.ends) == set(earlier.ends) for earlier in links[:i]):
            raise FieldError(f"links.between[{i}].ends", f"{list(link.ends)} are joined by an earlier link")


def uses(file: ClusterFile) -> Iterator[tuple[str, str]]:
    """Every (field, device name) that gives a device a task. Engine and drafter may share a stage's device."""
    for i, stage in enumerate(file.stages):
        yield from ((f"stages[{i}].devices[{j}]", name) for j, name in enumerate(stage.devices))
    if file.drafter is not None:
        yield "drafter", file.drafter
    if file.engine is not None:
        yield "engine", file.engine


# -------------------------------------------------------------------------------------------------------- emulation
# An emulated cluster needs every number that prices time and memory; a cluster of real devices may state none of them.


def check_emulated(cluster: Cluster, model: ModelPrice) -> None:
    """Raise FieldError unless every number that emulation needs is there, and the devices' memory suffices."""
    check_numbers(cluster)
    check_memory(cluster, model)


def check_numbers(cluster: Cluster) -> None:
    """Raise FieldError unless every number that emulation needs is there."""
    check_drafter(cluster)
    staged = {name for stage in cluster.stages for name in stage.devices}
    for i, device in enumerate(cluster.devices):
        check(device.threads is None, f"devices[{i}].threads", device.threads, "left out: the device is emulated")
        if device.name in staged:
            check_priced(f"devices[{i}]", device)
        elif device.name == cluster.drafter:
            check_priced(f"devices[{i}]", with_pass(device, cluster.draft_pass_ms))
    for one, other in cluster.hops():
        cluster.link(one, other)  # raises if it is missing


def check_priced(where: str, device: Device) -> None:
    """Raise FieldError unless the time of a pass is known, and stated in only one way."""
    if not device.priced:
        remedy = f"needs {PRICED_BY}, or a kind that has them; or compute_tflops and pass_ms"
        raise FieldError(where, f"({device.name!r}) {remedy}")
    both = [name for name in ("weight_bandwidth_gb_s", "overhead_ms") if getattr(device, name) is not None]
    if device.pass_ms is not None and both:
        raise FieldError(
            f"{where}.pass_ms", f"is measured and holds what {both[0]} is for, which is set too; remove one"
        )


def with_pass(device: Device, pass_ms: float | None) -> Device:
    """The drafter's device with the pass that the file states, in place of rate and overhead."""
    if pass_ms is None:
        return device
    return dataclasses.replace(device, pass_ms=pass_ms, weight_bandwidth_gb_s=None, overhead_ms=None)


def check_drafter(cluster: Cluster) -> None:
    """Raise FieldError where the drafter's device, its model and its pass do not go together."""
    if cluster.drafter is None and cluster.draft_as_model is not None:
        raise FieldError("drafter", "is missing: draft_as_model prices the device that it names")
    if cluster.drafter is not None and cluster.draft_as_model is None:
        raise FieldError("draft_as_model", "is missing: it prices the drafter")
    if cluster.draft_pass_ms is not None:
        check(cluster.drafter is not None, "draft_pass_ms", cluster.draft_pass_ms, "left out: there is no drafter")
    elif (stage := cluster.drafting_stage) is not None and cluster.device(str(cluster.drafter)).pass_ms is not None:
        problem = f"is missing: {cluster.drafter!r} has pass_ms, which is stages[{stage}]'s; measure the drafter's too"
        raise FieldError("draft_pass_ms", problem)


def refuse_emulation(cluster: Cluster) -> None:
    """Raise FieldError for a number that only emulation would use, and for a stage over several devices in sequence."""
    for i, device in enumerate(cluster.devices):
        for name in ("weight_bandwidth_gb_s", "compute_tflops", "overhead_ms", "pass_ms"):
            if getattr(device, name) is not None:
                raise FieldError("as_model", f"is missing: devices[{i}] ({device.name!r}) has {name}, for emulation")
    for name in ("draft_as_model", "draft_pass_ms"):
        if getattr(cluster, name) is not None:
            raise FieldError("as_model", f"is missing: {name} is set, for emulation")
    check(cluster.time_scale == 1, "time_scale", cluster.time_scale, "left at 1: no as_model, so nothing is emulated")
    if cluster.kv_slots != KV_SLOTS:
        raise FieldError("kv_slots", "counts in the memory of modelled devices, and as_model is missing; remove it")
    for i, stage in enumerate(cluster.stages):
        if len(stage.devices) > 1 and not stage.tensor_parallel:
            remedy = 'a real stage runs on one: give each device a stage of its own, or state split = "tensors"'
            raise FieldError(f"stages[{i}].devices", f"names {len(stage.devices)} devices, and {remedy}")
