"""The parts of an engine that a cluster file has emulated."""

from __future__ import annotations

from penstock.cluster import draft_link, draft_timing, feature_links, link_timings, load_cluster, stage_timings
from penstock.drafters.lookup import RatedLookup
from penstock.drafters.merged import MergedDrafter, NgramDrafter
from penstock.emulation.cluster import (
    drafter_emulation,
    modelled_drafter,
    off_its_device,
    on_its_device,
    stage_emulations,
)
from penstock.emulation.drafter import EmulatedDrafter
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
