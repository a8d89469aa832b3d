"""Clusters drawn from a seed: valid and the same everywhere, whatever the seed and the number of stages."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cluster import (
    Cluster,
    draft_link,
    draft_timing,
    link_timings,
    load_cluster,
    plain_step_seconds,
    random_cluster,
    stage_timings,
)
from penstock.cluster.drawn import MAX_STAGES, MIN_STAGES, SPREAD, split_by_speed
from penstock.config import FieldError

seeds = st.integers(0, 10**9)
counts = st.none() | st.integers(MIN_STAGES, MAX_STAGES)


@given(seeds, counts)
def test_every_seed_gives_a_valid_cluster_with_times(seed: int, stages: int | None) -> None:
    cluster = random_cluster(seed, stages)
    assert MIN_STAGES <= len(cluster.stages) <= MAX_STAGES
    assert stages in (None, len(cluster.stages))
    assert cluster.as_model is not None
    assert sum(sum(stage.layers) for stage in cluster.stages) == cluster.as_model.layers
    draft, link = draft_timing(cluster), draft_link(cluster)
    assert draft is not None
    assert link is not None
    for part in (*stage_timings(cluster), *link_timings(cluster), draft):
        assert 0 < part.seconds(1) <= part.seconds(64) < math.inf
    assert 0 < plain_step_seconds(cluster) < math.inf


@given(seeds, counts)
def test_its_name_gives_the_same_cluster(seed: int, stages: int | None) -> None:
    cluster = random_cluster(seed, stages)
    assert cluster.name == (f"random-{seed}" if stages is None else f"random-{seed}:{stages}")
    assert load_cluster(cluster.name) == cluster


@given(seeds, st.integers(8, MAX_STAGES))
def test_devices_and_links_are_unlike_but_of_one_kind(seed: int, stages: int) -> None:
    cluster = random_cluster(seed, stages)
    for numbers in (bandwidths(cluster), [link.bandwidth_gbit_s for link in cluster.links.between]):
        assert len(numbers) < 3 or len(set(numbers)) > 1
        assert max(numbers) <= 1.02 * SPREAD * min(numbers)  # 1.02: numbers are rounded to three digits


def bandwidths(cluster: Cluster) -> list[float]:
    return [device.weight_bandwidth_gb_s for device in cluster.devices if device.weight_bandwidth_gb_s is not None]


def test_a_seed_is_the_same_cluster_on_every_platform() -> None:
    """The expected values are written out, since a published figure for random-17 must stay reproducible."""
    cluster = load_cluster("random-17")
    assert cluster.as_model is not None
    first = cluster.devices[0]
    last = cluster.links.between[-1]
    assert (len(cluster.stages), cluster.as_model.layers, cluster.as_model.hidden_size) == (18, 118, 4096)
    assert (first.weight_bandwidth_gb_s, first.compute_tflops, first.overhead_ms) == (350.0, 57.8, 0.49)
    assert (last.bandwidth_gbit_s, last.latency_ms) == (0.794, 0.0483)


def test_seeds_spread_over_all_sizes() -> None:
    sizes = sorted(len(random_cluster(seed).stages) for seed in range(30))
    assert sizes[0] < 8 < 32 < sizes[-1]


@pytest.mark.parametrize(
    ("seed", "stages", "words"),
    [(-1, None, "seed is -1"), (0, 1, "stages is 1; it has to be between 2 and 128"), (0, 129, "stages is 129")],
)
def test_what_cannot_be_drawn_is_refused(seed: int, stages: int | None, words: str) -> None:
    with pytest.raises(FieldError, match=words):
        random_cluster(seed, stages)


def test_split_by_hand() -> None:
    assert split_by_speed(8, [1.0, 2.0, 1.0]) == [2, 4, 2]
    assert split_by_speed(3, [1.0, 100.0, 1.0]) == [1, 1, 1]


@given(st.lists(st.floats(1, 1000), min_size=1, max_size=20), st.integers(0, 100))
def test_no_split_has_a_faster_slowest_stage(speeds: list[float], more: int) -> None:
    """Not one layer less on the slowest stage would fit elsewhere without another becoming as slow."""
    counts = split_by_speed(len(speeds) + more, speeds)
    assert sum(counts) == len(speeds) + more
    assert min(counts) >= 1
    times = [count / speed for count, speed in zip(counts, speeds, strict=True)]
    slowest = times.index(max(times))
    if counts[slowest] > 1:
        others = [(n + 1) / v for i, (n, v) in enumerate(zip(counts, speeds, strict=True)) if i != slowest]
        assert not others or min(others) >= max(times) * (1 - 1e-12)


def test_neighbours_on_one_host_share_its_link() -> None:
    cluster = next(c for c in map(random_cluster, range(100)) if len({d.host for d in c.devices}) < len(c.devices) - 1)
    inside = [cluster.link(one.name, other.name) for one, other in pairwise(cluster.devices) if one.host == other.host]
    assert inside
    assert set(inside) == {cluster.links.local}
