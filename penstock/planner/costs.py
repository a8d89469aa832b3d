"""Times of a cluster's devices and links for any layers that the devices might be given."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations, product
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.cluster.spec import Cluster, Device, ModelPrice
from penstock.cluster.tensor_parallel import check_divisible
from penstock.cluster.timing import (
    MESSAGE_ROW_BYTES,
    Attended,
    LinkTiming,
    held_by,
    held_by_part,
    link_timing,
    part_timing,
    slowest_link,
)
from penstock.config import FieldError
from penstock.planner.partition import Problem, Seconds

Group = tuple[Device, ...]
"""Devices that hold a stage together: a single one, or the ranks of a tensor parallel group, its leader first."""
MOST_GROUPINGS: Final = 16
"""Most ways to join devices into groups that are planned for."""


class Batch(NamedTuple):
    """The batch that stages are planned for: ``rows`` rows of one text that has ``context`` tokens."""

    rows: int
    context: int

    @property
    def attended(self) -> Attended:
        return Attended(self.rows * self.context, self.context)


def candidates(cluster: Cluster) -> tuple[Device, ...]:
    """The devices that may hold layers: those that hold some in the file, and those that have no other task there.

    Raises FieldError for a device whose times are known only for the layers that it has.
    """
    staged = {name for stage in cluster.stages for name in stage.devices}
    busy = {cluster.drafter, cluster.engine} - staged
    found = []
    for i, device in enumerate(cluster.devices):
        if device.name in busy:
            continue
        if device.pass_ms is not None:
            problem = "holds for layers that no stage of the file states; state them, or weight_bandwidth_gb_s instead"
            raise FieldError(f"devices[{i}].pass_ms", problem)
        if not device.priced:
            raise FieldError(f"devices[{i}]", f"({device.name!r}) has no prices; state them, or remove the device")
        found.append(device)
    return tuple(found)


def groupings(cluster: Cluster, devices: Sequence[Device]) -> Iterator[tuple[Group, ...]]:
    """Ways to join the devices into groups; the first one leaves every device alone.

    Devices of one host that are alike and joined alike are of one kind; kinds of several hosts that have the same
    numbers and links are joined alike. A kind's groups have 2, 4, 8, ... ranks, as many as the model's layers can be
    shared by, and its remaining devices stay alone. Every combination of the kinds' sizes is there, or where these are
    more than MOST_GROUPINGS every size for all kinds alike.
    """
    model = cluster.as_model
    assert model is not None
    kinds: dict[object, dict[str, list[Device]]] = {}
    for kind, members in alike_on_a_host(cluster, devices):
        kinds.setdefault(kind, {})[members[0].host + members[0].name] = members
    sizes = [[1, *sizes_of(model, max(map(len, places.values())))] for places in kinds.values()]
    choices = list(product(*sizes))
    if len(choices) > MOST_GROUPINGS:
        most = max(map(max, sizes))
        choices = [tuple(min(size, one[-1]) for one in sizes) for size in (2**n for n in range(most.bit_length()))]
    order = {device.name: i for i, device in enumerate(devices)}
    for choice in choices:
        found = [
            group
            for size, places in zip(choice, kinds.values(), strict=True)
            for members in places.values()
            for group in in_groups(members, size)
        ]
        yield tuple(sorted(found, key=lambda group: order[group[0].name]))


def alike_on_a_host(cluster: Cluster, devices: Sequence[Device]) -> Iterator[tuple[object, list[Device]]]:
    """(kind, its devices on one host); a kind is a device's numbers and the slowest link between any two of them.

    Only devices whose whole price is known by rates are joined: a measured layer says nothing of a share of it.
    """
    hosts: dict[tuple[object, ...], list[Device]] = {}
    for device in devices:
        by_rates = device.measured is None and device.pass_ms is None
        # The drafter's device has less memory and other work, so that it is unlike every other.
        alone = None if by_rates and device.name != cluster.drafter else device.name
        hosts.setdefault((device.host, numbers_of(device), device.memory_gb, alone), []).append(device)
    for kind, members in hosts.items():
        joined = slowest_link(cluster, members) if len(members) > 1 else None
        yield (*kind[1:], joined), members


def sizes_of(model: ModelPrice, devices: int) -> list[int]:
    """The sizes that groups of at most so many devices may have: 2, 4, 8, ..., while the model can be divided."""
    found = []
    for size in (2**n for n in range(1, devices.bit_length())):
        try:
            check_divisible(model, size, "devices")
        except FieldError:
            break
        found.append(size)
    return found


def in_groups(members: Sequence[Device], size: int) -> Iterator[Group]:
    """Groups of ``size`` neighbours, and each device that is left alone."""
    whole = len(members) - len(members) % size
    yield from (tuple(members[i : i + size]) for i in range(0, whole, size))
    yield from ((device,) for device in members[whole:])


def problem_of(cluster: Cluster, devices: Sequence[Device], batch: Batch) -> Problem:
    """The planning problem for single devices: ``grouped_problem`` without groups."""
    return grouped_problem(cluster, [(device,) for device in devices], batch)


def grouped_problem(cluster: Cluster, groups: Sequence[Group], batch: Batch) -> Problem:
    """The planning problem in which each group is a device, whatever stages the file has.

    A link is busy until the next batch can arrive over it. A stage asks for the next batch when it begins one: the
    question takes the link's latency, and so does the batch. A group's messages are those of its leader.
    """
    model = cluster.as_model
    assert model is not None
    tables: dict[object, Seconds] = {}
    for group in groups:
        if kind_of(cluster, group) not in tables:
            tables[kind_of(cluster, group)] = stage_table(cluster, model, group, batch)
    stage_s = np.stack([tables[kind_of(cluster, group)] for group in groups])
    for n, group in enumerate(groups):
        stage_s[n][~holdable(cluster, model, group)] = math.inf
    leaders = [group[0] for group in groups]
    ends = [link_timing(cluster, cluster.engine, device.name, MESSAGE_ROW_BYTES) for device in leaders]
    end_s, end_busy_s = (np.array([taken(link, batch) for link in ends]) for taken in (crossing, busy))
    hop_s, hop_busy_s = (np.zeros((len(groups), len(groups))) for _ in range(2))
    for (i, one), (j, two) in combinations(enumerate(leaders), 2):
        link = link_timing(cluster, one.name, two.name, model.row_bytes)
        hop_s[i, j] = hop_s[j, i] = crossing(link, batch)
        hop_busy_s[i, j] = hop_busy_s[j, i] = busy(link, batch)
    return Problem(
        stage_s=stage_s,
        hop_s=hop_s,
        hop_busy_s=hop_busy_s,
        **{f"{way}_s": end_s for way in ("enter", "leave")},
        **{f"{way}_busy_s": end_busy_s for way in ("enter", "leave")},
    )


def numbers_of(device: Device) -> Device:
    """The device without what its times do not depend on: equal for devices that are alike."""
    return replace(device, name="any", host="", kind=None, memory_gb=None)


def kind_of(cluster: Cluster, group: Group) -> object:
    """All that a group's times depend on: its devices' numbers, and the link between them."""
    return tuple(map(numbers_of, group)), slowest_link(cluster, group) if len(group) > 1 else None


def crossing(link: LinkTiming, batch: Batch) -> float:
    return link.seconds(batch.rows)


def busy(link: LinkTiming, batch: Batch) -> float:
    return link.seconds(batch.rows) + link.latency_s


def stage_table(cluster: Cluster, model: ModelPrice, group: Group, batch: Batch) -> Seconds:
    """[L + 1, L + 1]: seconds for layers i to j - 1, with the head if j is L; infinite for no layer."""

    def seconds(layers: range, *, head: bool) -> float:
        return part_timing(cluster, model, group, layers, head=head).seconds(batch.rows, batch.attended)

    return by_range(model, lambda layers: seconds(layers, head=layers.stop == model.layers))


def by_range(model: ModelPrice, value: Callable[[range], float]) -> Seconds:
    """[L + 1, L + 1]: the ``value`` of layers i to j - 1, infinite for none.

    It is asked for once for each mix of kinds of layers; that may begin with the first layer or end with the last one.
    """
    table: Seconds = np.full((model.layers + 1, model.layers + 1), math.inf)
    known: dict[object, float] = {}
    for i, j in combinations(range(model.layers + 1), 2):
        mix = model.counts(range(i, j)), i == 0, j == model.layers
        if mix not in known:
            known[mix] = value(range(i, j))
        table[i, j] = known[mix]
    return table


def holdable(cluster: Cluster, model: ModelPrice, group: Group) -> npt.NDArray[np.bool_]:
    """[L + 1, L + 1]: whether every device has the memory for its part of layers i to j - 1, and of the drafter where
    it drafts."""
    draft = cluster.draft_as_model
    if all(device.memory_gb is None for device in group):
        return np.full((model.layers + 1, model.layers + 1), True)

    def excess(layers: range) -> float:
        """Bytes that the device with the least room to spare lacks; 0 or below where all have room."""
        embedding, head = layers.start == 0, layers.stop == model.layers
        each, lacking = held_by_part(model, group, layers, cluster.kv_slots, embedding=embedding, head=head), -math.inf
        for device, held in zip(group, each, strict=True):
            if draft is not None and device.name == cluster.drafter:
                held += held_by(draft, draft.all_layers, cluster.kv_slots, embedding=True, head=True)
            if device.memory_gb is not None:
                lacking = max(lacking, held.total - device.memory_gb * 1e9)
        return lacking

    return by_range(model, excess) <= 0


def shortage(cluster: Cluster, devices: Sequence[Device]) -> str:
    """The reason why no plan fits: the memory that the model needs and that these devices have, in GB."""
    model = cluster.as_model
    assert model is not None
    whole = held_by(model, model.all_layers, cluster.kv_slots, embedding=True, head=True)
    each = [held_by(model, range(i, i + 1), cluster.kv_slots, embedding=False, head=False) for i in model.all_layers]
    layer = max(each, key=lambda one: one.weights + one.cache)
    have = ", ".join(f"{one.name} {round(one.memory_gb, 2):g}" for one in devices if one.memory_gb is not None)
    which = "the largest" if model.kinds else "a"
    return (
        f"the model needs {whole.total / 1e9:.2f} GB (weights {whole.weights / 1e9:.2f}, {cluster.kv_slots} tokens of "
        f"KV {whole.cache / 1e9:.2f}), {which} layer {(layer.weights + layer.cache) / 1e9:.2f}; devices have, in GB: "
        f"{have}"
    )
