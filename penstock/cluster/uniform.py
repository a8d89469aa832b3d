"""Makes clusters of any number of stages that are all like the first stage of another cluster."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

from penstock.cluster.spec import Cluster, Device, Link, LinkBetween, Links, Stage
from penstock.config import check


def uniform_cluster(cluster: Cluster, stages: int) -> Cluster:
    """A cluster of ``stages`` stages, each with copies of the first stage's devices and as many layers as that has.

    The model grows with them (the last stage has its head, too), so that a stage takes the same time however many there
    are. Between stages lies the link from the first to the second, or in a cluster of one stage that to the engine;
    engine and drafter keep their devices, and their links to the first stage. The engine runs on the first copy where
    it ran on the first stage; a drafter that shares the last stage's device shares the last copy's, one that shares
    another's the first copy's. Memory is not checked. The cluster has to be emulated. Raises FieldError for less than
    one stage.
    """
    check(stages >= 1, "stages", stages, "at least 1")
    assert cluster.as_model is not None
    first = cluster.stages[0]
    names = [tuple(copy_of(name, i) for name in first.devices) for i in range(stages)]
    copies = [Stage(devices=devices, layers=first.layers) for devices in names]
    drafter = drafter_among(cluster, copies)
    engine = copy_of(cluster.engine, 0) if cluster.engine in first.devices else cluster.engine
    if cluster.engine == cluster.drafter and drafter is not None:
        engine = drafter
    return replace(
        cluster,
        name=f"{cluster.name}:{stages}",
        description=f"{stages} stages like the first of {cluster.name}",
        devices=tuple(devices_of(cluster, copies, {engine, drafter})),
        links=Links(between=tuple(links_of(cluster, copies, engine, drafter))),
        stages=tuple(copies),
        engine=engine,
        drafter=drafter,
        as_model=replace(cluster.as_model, layers=stages * sum(first.layers)),
    )


def copy_of(name: str, index: int) -> str:
    return f"{name}-{index + 1}"


def drafter_among(cluster: Cluster, copies: list[Stage]) -> str | None:
    """The drafter's device: its own or, if it shares a stage's, that of the last or the first copy."""
    if cluster.drafting_stage is None:
        return cluster.drafter
    return copies[-1 if cluster.drafting_stage == len(cluster.stages) - 1 else 0].devices[-1]


def devices_of(cluster: Cluster, copies: list[Stage], others: set[str | None]) -> Iterator[Device]:
    """Copies of devices, and the engine's and the drafter's own; each on its own host, since all links are stated."""
    first = cluster.stages[0].devices
    for stage in copies:
        for original, name in zip(first, stage.devices, strict=True):
            yield replace(cluster.device(original), name=name, host=name)
    for device in cluster.devices:
        if device.name in others:
            yield replace(device, host=device.name)


def links_of(cluster: Cluster, copies: list[Stage], engine: str, drafter: str | None) -> Iterator[LinkBetween]:
    """Every link that messages take, with the names of its devices as ends."""
    first, second = cluster.stages[0].devices, cluster.stages[min(1, len(cluster.stages) - 1)].devices
    outside = cluster.link(cluster.engine, first[0])
    hop = cluster.link(first[-1], second[0]) if len(cluster.stages) > 1 else outside
    found: dict[frozenset[str], Link | None] = {}
    for stage in copies:
        for (one, other), ends in zip(pairwise(first), pairwise(stage.devices), strict=True):
            found[frozenset(ends)] = cluster.link(one, other)
    for stage, following in pairwise(copies):
        found[frozenset((stage.devices[-1], following.devices[0]))] = hop
    for end in (copies[0].devices[0], copies[-1].devices[-1]):
        found.setdefault(frozenset((engine, end)), outside or hop)
    if cluster.drafter is not None and drafter is not None:
        found[frozenset((engine, drafter))] = cluster.link(cluster.engine, cluster.drafter)
    for between, link in found.items():
        if link is not None and len(between) == 2:  # a set of one is a device and itself
            yield LinkBetween(
                ends=tuple(sorted(between)), bandwidth_gbit_s=link.bandwidth_gbit_s, latency_ms=link.latency_ms
            )
