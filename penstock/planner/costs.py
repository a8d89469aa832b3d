"""Times of a cluster's devices and links for any layers that the devices might be given."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.cluster.spec import Cluster, Device, ModelPrice
from penstock.cluster.timing import MESSAGE_ROW_BYTES, Attended, LinkTiming, held_by, link_timing, stage_part
from penstock.config import FieldError
from penstock.planner.partition import Problem, Seconds


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


def problem_of(cluster: Cluster, devices: Sequence[Device], batch: Batch) -> Problem:
    """The planning problem for these devices, whatever stages the file has.

    A link is busy until the next batch can arrive over it. A stage asks for the next batch when it begins one: the
    question takes the link's latency, and so does the batch.
    """
    model = cluster.as_model
    assert model is not None
    tables = {kind: stage_table(cluster, model, kind, batch) for kind in dict.fromkeys(map(numbers_of, devices))}
    stage_s = np.stack([tables[numbers_of(device)] for device in devices])
    for n, device in enumerate(devices):
        stage_s[n][~holdable(cluster, model, device)] = math.inf
    ends = [link_timing(cluster, cluster.engine, device.name, MESSAGE_ROW_BYTES) for device in devices]
    end_s, end_busy_s = (np.array([taken(link, batch) for link in ends]) for taken in (crossing, busy))
    hop_s, hop_busy_s = (np.zeros((len(devices), len(devices))) for _ in range(2))
    for (i, one), (j, two) in combinations(enumerate(devices), 2):
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


def crossing(link: LinkTiming, batch: Batch) -> float:
    return link.seconds(batch.rows)


def busy(link: LinkTiming, batch: Batch) -> float:
    return link.seconds(batch.rows) + link.latency_s


def stage_table(cluster: Cluster, model: ModelPrice, device: Device, batch: Batch) -> Seconds:
    """[L + 1, L + 1]: seconds for layers i to j - 1, with the head if j is L; infinite for no layer."""
    counts = range(1, model.layers + 1)
    inner, last = (
        [
            stage_part(device, model, n, cluster.time_scale, head=head).seconds(batch.rows, batch.attended)
            for n in counts
        ]
        for head in (False, True)
    )
    table = by_range(model.layers, inner)
    table[:-1, -1] = last[::-1]  # layers i to L - 1 are L - i layers: from L of them in row 0 down to one
    return table


def by_range(layers: int, by_count: Sequence[float]) -> Seconds:
    """[L + 1, L + 1]: a value for layers i to j - 1, from those of 1, 2, ... layers; infinite for none."""
    ends = np.arange(layers + 1)
    # Entry (i, j) is that of j - i layers; where j < i, the clip makes it that of none.
    table: Seconds = np.array([math.inf, *by_count])[np.clip(ends[None, :] - ends[:, None], 0, None)]
    return table


def holdable(cluster: Cluster, model: ModelPrice, device: Device) -> npt.NDArray[np.bool_]:
    """[L + 1, L + 1]: whether the device has the memory for layers i to j - 1, beside the drafter where it drafts."""
    layers = model.layers
    if device.memory_gb is None:
        return np.full((layers + 1, layers + 1), True)
    free = device.memory_gb * 1e9
    draft = cluster.draft_as_model if cluster.drafter == device.name else None
    drafting = held_by(draft, draft.layers, cluster.kv_slots, embedding=True, head=True) if draft is not None else None

    def bytes_of(count: int, *, embedding: bool, head: bool) -> float:
        held = held_by(model, count, cluster.kv_slots, embedding=embedding, head=head)
        return (held if drafting is None else held + drafting).total

    # Row 0 adds the embedding, the last column the head; the corner, the whole model, has both.
    counts = range(1, layers + 1)
    table = by_range(layers, [bytes_of(n, embedding=False, head=False) for n in counts])
    table[:-1, -1] = [bytes_of(n, embedding=False, head=True) for n in reversed(counts)]
    table[0, 1:] = [bytes_of(n, embedding=True, head=n == layers) for n in counts]
    return table <= free


def shortage(cluster: Cluster, devices: Sequence[Device]) -> str:
    """The reason why no plan fits: the memory that the model needs and that these devices have, in GB."""
    model = cluster.as_model
    assert model is not None
    whole = held_by(model, model.layers, cluster.kv_slots, embedding=True, head=True)
    layer = held_by(model, 1, cluster.kv_slots, embedding=False, head=False)
    have = ", ".join(f"{one.name} {round(one.memory_gb, 2):g}" for one in devices if one.memory_gb is not None)
    return (
        f"the model needs {whole.total / 1e9:.2f} GB (weights {whole.weights / 1e9:.2f}, {cluster.kv_slots} tokens of "
        f"KV {whole.cache / 1e9:.2f}), a layer {(layer.weights + layer.cache) / 1e9:.2f}; devices have, in GB: {have}"
    )


def without_links(problem: Problem) -> Problem:
    """The same devices, joined by links that take no time, as Jupiter's paper assumes (``jupiter.py``)."""
    zeros = np.zeros_like(problem.enter_s)
    hops = np.zeros_like(problem.hop_s)
    return replace(
        problem,
        hop_s=hops,
        hop_busy_s=hops,
        enter_s=zeros,
        leave_s=zeros,
        enter_busy_s=zeros,
        leave_busy_s=zeros,
    )
