"""Gives each device of a cluster file the layers that it is priced with: as stages state them, or by devices' speed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.cluster.memory import held_by
from penstock.cluster.prices import ModelPrice
from penstock.cluster.spec import Cluster, Device, Stage
from penstock.cluster.timing import device_timing
from penstock.config import FieldError, check


@dataclass(frozen=True, kw_only=True)
class StageEntry:
    """A stage of a cluster file. ``layers``: of the whole stage, spread evenly over its devices, or one per device."""

    devices: tuple[str, ...]
    layers: int | tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        check(bool(self.devices), "devices", [], "a list of at least one device")


def stages_with_layers(entries: tuple[StageEntry, ...], cluster: Cluster) -> tuple[Stage, ...]:
    """Give every device its number of layers: as every stage states them, else by speed, or evenly over equal ones."""
    model = cluster.as_model
    stated = [i for i, entry in enumerate(entries) if entry.layers is not None]
    if model is None:
        if stated:
            problem = "prices an emulated stage, and as_model is missing; to split a real model use layer_split"
            raise FieldError(f"stages[{stated[0]}].layers", problem)
        return tuple(Stage(devices=entry.devices) for entry in entries)
    if not stated:
        counts = iter(unstated_layers([name for entry in entries for name in entry.devices], cluster, model))
        return tuple(Stage(devices=e.devices, layers=tuple(next(counts) for _ in e.devices)) for e in entries)
    if len(stated) < len(entries):
        missing = next(i for i in range(len(entries)) if i not in stated)
        raise FieldError(f"stages[{missing}].layers", "is missing: state the layers of every stage or of none")
    stages = tuple(Stage(devices=entry.devices, layers=device_layers(i, entry)) for i, entry in enumerate(entries))
    total = sum(sum(stage.layers) for stage in stages)
    if total != model.layers:
        raise FieldError("stages", f"hold {total} layers together; as_model has {model.layers}")
    return stages


def unstated_layers(names: Sequence[str], cluster: Cluster, model: ModelPrice) -> Sequence[int]:
    """Layers of each device, in order, where no stage states any.

    Devices that differ get them by speed. Equal ones get equal numbers; a remainder goes to the first ones, since the
    last one holds the head.
    """
    if len(names) > model.layers:
        problem = f"name {len(names)} devices for the {model.layers} layers of as_model; use fewer"
        raise FieldError("stages", problem)
    devices = [cluster.device(name) for name in names]
    # Names, hosts and kinds say nothing of a device's speed.
    kinds = {dataclasses.replace(device, name="", host="", kind=None) for device in devices}
    if len(kinds) > 1 and all(device.priced for device in devices):
        return layers_by_speed(devices, cluster, model)
    return spread(model.layers, len(names))


def layers_by_speed(devices: Sequence[Device], cluster: Cluster, model: ModelPrice) -> list[int]:
    """Layers of each device such that the slowest one is as fast as it can be.

    Each layer goes to the device that would be done first with it. A device whose memory is full gets no more, unless
    all are full.
    """

    def after(i: int) -> tuple[bool, float]:
        device, head = devices[i], i == len(devices) - 1
        held = held_by(model, counts[i] + 1, cluster.kv_slots, embedding=i == 0, head=head)
        full = device.memory_gb is not None and held.total > device.memory_gb * 1e9
        return full, device_timing(device, model, counts[i] + 1, 1.0, head=head).seconds(1)

    counts = [1] * len(devices)
    for _ in range(model.layers - len(devices)):
        counts[min(range(len(devices)), key=after)] += 1  # False sorts first: devices that have room
    return counts


def device_layers(index: int, entry: StageEntry) -> tuple[int, ...]:
    """The layers of each device of a stage that states them."""
    where, devices, layers = f"stages[{index}].layers", len(entry.devices), entry.layers
    if isinstance(layers, int):
        check(layers >= devices, where, layers, f"at least 1 for each of its {devices} devices")
        return spread(layers, devices)
    assert layers is not None
    check(len(layers) == devices, where, list(layers), f"a number, or one for each of its {devices} devices")
    check(min(layers) >= 1, where, list(layers), "at least 1 everywhere")
    return layers


def spread(layers: int, devices: int) -> tuple[int, ...]:
    each, left = divmod(layers, devices)
    return tuple(each + (i < left) for i in range(devices))
