"""Clusters of stages that are all like another's first."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.cluster import load_cluster, plain_step_seconds, preset_names, stage_timings
from penstock.cluster.drawn import uniform_cluster
from penstock.config import FieldError


@pytest.mark.parametrize("name", preset_names())
def test_every_stage_takes_the_first_ones_time(name: str) -> None:
    cluster = load_cluster(name)
    first = stage_timings(cluster)[0].seconds(1)
    for stages in (1, 2, 128):
        alike = uniform_cluster(cluster, stages)
        assert len(alike.stages) == stages
        *others, last = [timing.seconds(1) for timing in stage_timings(alike)]
        assert others == pytest.approx([first] * (stages - 1))
        assert last >= first * (1 - 1e-9), "the last one has the head, too"
        for one, other in alike.hops():
            alike.link(one, other)


def test_the_links_are_those_of_the_first_two_stages_and_the_engines() -> None:
    cluster = load_cluster("pipedec-14x3090")
    alike = uniform_cluster(cluster, 3)
    assert [alike.link(*hop) for hop in alike.route()][1:3] == [
        link_like(cluster.link("a1", "a2"), ("a1-1", "a1-2")),
        link_like(cluster.link("a1", "a2"), ("a1-2", "a1-3")),
    ]
    ends = [alike.link(*alike.route()[i]) for i in (0, 3)]
    assert all(link is not None and link.bandwidth_gbit_s == 9.4 for link in ends)
    assert plain_step_seconds(uniform_cluster(cluster, 6)) > plain_step_seconds(alike)


def link_like(link: object, ends: tuple[str, str]) -> object:
    from penstock.cluster.spec import Link, LinkBetween

    assert isinstance(link, Link)
    return LinkBetween(ends=ends, bandwidth_gbit_s=link.bandwidth_gbit_s, latency_ms=link.latency_ms)


def test_no_stage_at_all_is_refused() -> None:
    with pytest.raises(FieldError, match="stages is 0"):
        uniform_cluster(load_cluster("demo"), 0)


def test_a_drafter_keeps_its_place_among_the_stages() -> None:
    for place, copy in (("last-stage", "board-1-6"), ("board-2", "board-1-1"), ("engine", "board-5")):
        alike = uniform_cluster(load_cluster("demo", drafter_on=place), 6)
        assert (alike.drafter, alike.engine) == (copy, "board-5")
        for hop in alike.hops():
            alike.link(*hop)
    together = replace(load_cluster("demo", drafter_on="last-stage"), engine="board-4")
    alike = uniform_cluster(together, 6)
    assert alike.engine == alike.drafter == "board-1-6"
    assert "board-4" not in {device.name for device in alike.devices}
