"""The parts of an engine that a cluster file has emulated."""

from __future__ import annotations

import msgspec

from penstock.cluster import (
    Attended,
    draft_link,
    draft_timing,
    feature_links,
    link_timings,
    load_cluster,
    stage_timings,
)
from penstock.drafters.merged import MergedDrafter, NgramDrafter, RatedLookup
from penstock.emulation.cluster import (
    EmulatedDrafter,
    drafter_emulation,
    modelled_drafter,
    off_its_device,
    on_its_device,
    stage_emulations,
)
from penstock.emulation.device import ModelledDevice
from penstock.emulation.stage import StageEmulation
from penstock.messages import Rows
from penstock.pipeline.base import VirtualClock


def test_nothing_of_a_real_cluster_is_emulated() -> None:
    drafter = NgramDrafter(4, 1)
    for cluster in (None, load_cluster("local-3")):
        assert stage_emulations(cluster, 3, drafter, features=True) == [None] * 3
        assert drafter_emulation(cluster, None) is None
        assert on_its_device(cluster, drafter, None, VirtualClock()) is drafter
    assert off_its_device(drafter) is drafter


def test_stages_and_links_take_the_clusters_times() -> None:
    cluster = load_cluster("spd-4")
    found = [one for one in stage_emulations(cluster, 4, features=True) if one is not None]
    assert [one.timing for one in found] == list(stage_timings(cluster))
    assert [found[0].up, *(one.down for one in found)] == list(link_timings(cluster))
    assert [one.up for one in found[1:]] == [one.down for one in found[:-1]]
    assert [one.to_drafter for one in found] == list(feature_links(cluster))
    assert not any(one.shared or one.real_time for one in found)
    assert [one.to_drafter for one in stage_emulations(cluster, 4) if one] == [None] * 4


def test_a_stage_shares_its_device_with_a_drafter_that_takes_time() -> None:
    cluster = load_cluster("spd-4", drafter_on="last-stage")
    drafter = on_its_device(cluster, NgramDrafter(4, 1), None, VirtualClock())
    assert isinstance(drafter, EmulatedDrafter)
    assert isinstance(off_its_device(drafter), NgramDrafter)
    assert (draft_timing(cluster), draft_link(cluster)) == (drafter._timing, drafter._link)
    merged = MergedDrafter(drafter, RatedLookup(4, 1))
    assert modelled_drafter(merged) is modelled_drafter(drafter) is drafter
    assert off_its_device(merged) is off_its_device(drafter)
    on_stage, nowhere = [False, False, False, True], [False] * 4
    for one, shared in ((drafter, on_stage), (merged, on_stage), (NgramDrafter(4, 1), nowhere)):
        assert [stage.shared for stage in stage_emulations(cluster, 4, one) if stage] == shared


def test_a_tensor_parallel_group_is_emulated_as_one_stage() -> None:
    """Its stage process waits for the slowest rank and the exchange, and the price crosses to that process."""
    groups = [
        {"devices": list(one.devices), "split": "tensors", "layers": sum(one.layers)}
        for one in load_cluster("pipedec-7").stages
    ]
    cluster = load_cluster("pipedec-7", stages=groups)
    first = next(one for one in stage_emulations(cluster, 7) if one is not None)
    assert first.timing == stage_timings(cluster)[0]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(first), type=StageEmulation) == first
    assert first.timing is not None
    device, rows = ModelledDevice(0, VirtualClock().now, first.timing), Rows([0], [1], [0], [-1], [0], [1])
    assert device.computed(0.0, rows, [0]).modelled == first.timing.seconds(1, Attended(1, 1))
