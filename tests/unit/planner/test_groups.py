"""The groups of devices that a plan may use, and what the planning problem says of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from penstock.cluster import Cluster, load_devices, stage_timings
from penstock.cluster.spec import LinkBetween, Stage
from penstock.cluster.timing import held_by_part
from penstock.planner.costs import Batch, candidates, grouped_problem, groupings, problem_of

BATCH = Batch(rows=8, context=512)


def sizes(cluster: Cluster) -> list[list[int]]:
    return [[len(group) for group in groups] for groups in groupings(cluster, candidates(cluster))]


def test_cards_of_a_server_are_joined_and_those_of_two_are_not() -> None:
    """Seven cards in each of two servers: alone, three pairs, one group of four. No group is in both servers."""
    cluster = load_devices("pipedec-14x3090")
    assert sizes(cluster) == [[1] * 14, [2, 2, 2, 1] * 2, [4, 1, 1, 1] * 2]
    for groups in groupings(cluster, candidates(cluster)):
        assert sorted(device.name for group in groups for device in group) == sorted(
            device.name for device in candidates(cluster)
        )
        assert all(len({device.host for device in group}) == 1 for group in groups)


def test_a_card_with_other_links_is_of_another_kind() -> None:
    """Where one server's cards have a link of their own, its groups are chosen by themselves."""
    cluster = load_devices("two-servers")
    own = tuple(
        LinkBetween(ends=(one, two), bandwidth_gbit_s=1, latency_ms=1)
        for i, one in enumerate(["b1", "b2", "b3", "b4"])
        for two in ["b1", "b2", "b3", "b4"][i + 1 :]
    )
    unlike = replace(cluster, links=replace(cluster.links, between=own))
    assert sizes(cluster) == [[1] * 8, [2] * 4, [4] * 2]
    assert len(sizes(unlike)) == 9, "three sizes in each server"


def test_where_kinds_are_many_all_are_joined_alike() -> None:
    cluster = load_devices("two-servers")
    hosts = [replace(one, host=f"h{i // 2}", overhead_ms=1.0 + i // 2) for i, one in enumerate(cluster.devices[:8])]
    links = replace(cluster.links, local=cluster.links.local)
    many = replace(cluster, devices=(*hosts, cluster.devices[8]), links=links)
    assert len(sizes(many)) == 16
    more = [replace(one, name=f"{one.name}'", host=f"{one.host}'", overhead_ms=9.0) for one in hosts[:2]]
    assert sizes(replace(many, devices=(*many.devices, *more))) == [[1] * 10, [2] * 5]


@pytest.mark.parametrize("name", ["jupiter-heterogeneous", "demo", "spd-4", "random-3:6"])
def test_unlike_or_distant_devices_stay_alone(name: str) -> None:
    cluster = load_devices(name)
    assert sizes(cluster) == [[1] * len(candidates(cluster))]


def test_the_drafters_device_and_unknown_sizes_stay_alone() -> None:
    cluster = load_devices("pipedec-7")
    shared = replace(cluster, drafter="a1", engine="a1")
    pairs = next(groups for groups in groupings(shared, candidates(shared)) if any(len(one) > 1 for one in groups))
    assert (shared.device("a1"),) in pairs
    assert cluster.as_model is not None
    unknown = replace(cluster, as_model=replace(cluster.as_model, key_value_heads=None))
    assert sizes(unknown) == [[1] * 14]
    assert sizes(replace(cluster, as_model=replace(cluster.as_model, key_value_heads=2)))[-1] == [2, 2, 2, 1] * 2


def test_a_groups_row_of_the_problem_is_what_the_stage_takes() -> None:
    cluster = load_devices("two-servers")
    pairs = next(groups for groups in groupings(cluster, candidates(cluster)) if len(groups[0]) == 2)
    problem = grouped_problem(cluster, pairs, BATCH)
    stages = tuple(Stage(devices=(one.name, two.name), layers=(20,), split="tensors") for one, two in pairs)
    for i, timing in enumerate(stage_timings(replace(cluster, stages=stages))):
        expected = problem.stage_s[i, 20 * i, 20 * i + 20]
        assert timing.seconds(BATCH.rows, BATCH.attended) == pytest.approx(expected)
    assert cluster.as_model is not None
    held = held_by_part(cluster.as_model, pairs[0], range(80), cluster.kv_slots, embedding=True, head=True)
    assert np.isfinite(problem.stage_s[0, 0, 80]) == (held[0].total <= 80e9)


def test_single_devices_are_groups_of_one() -> None:
    cluster = load_devices("jupiter-heterogeneous")
    devices = candidates(cluster)
    one, other = problem_of(cluster, devices, BATCH), grouped_problem(cluster, [(d,) for d in devices], BATCH)
    assert np.array_equal(one.stage_s, other.stage_s)
    assert np.array_equal(one.hop_s, other.hop_s)
