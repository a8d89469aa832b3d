"""Clusters without a file: drawn at random from a seed, or uniform."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from random import Random
from typing import Any, Final

from penstock.cluster.spec import PRICES, Cluster, Device, Link, LinkBetween, Links, ModelPrice, Stage, eagle, llama
from penstock.config import check

# ---------------------------------------------------------------------------------------------------------------- drawn
# Draws clusters at random from a seed: any number of stages, unlike devices and links, numbers that real ones have.
#
# A cluster has a level for each number, drawn log-uniformly over the range that real devices span. The numbers of its
# devices and links lie within a factor of 4 of one another, since people join the devices that they have, but seldom a
# data centre's GPU to an edge board. Numbers are rounded to three digits, so that no platform's arithmetic shows in
# them.

MIN_STAGES: Final = 2
MAX_STAGES: Final = 128
"""The fewest and the most stages of a drawn cluster: one is no pipeline, and the largest models have 128 layers."""
SPREAD: Final = 4.0
"""Ratio of the highest number to the lowest that the devices, or the links, of one cluster may have. At 1 all would be
alike; the spans below reach over factors of up to 1,000, which no cluster has."""


@dataclass(frozen=True)
class Span:
    """A range from the lowest to the highest number that real devices or links have."""

    low: float
    high: float

    def draw(self, rng: Random) -> float:
        """A number drawn log-uniformly, rounded to three digits."""
        return three_digits(self.low * (self.high / self.low) ** rng.random())

    def part(self, rng: Random) -> Span:
        """One cluster's share of the span: a factor of SPREAD from its lowest to its highest number, anywhere in it."""
        low = Span(self.low, self.high / SPREAD).draw(rng)
        return Span(low, low * SPREAD)


LAYERS: Final = Span(16, 128)  # Llama-3.2-1B has 16, Llama-3.1-405B 126; up to 128, since a stage has at least one
WEIGHT_BANDWIDTH_GB_S: Final = Span(20, 2680)  # 80% of a Jetson Nano's 25.6 and of an H100's 3350
OPERATIONS_PER_BYTE: Final = Span(20, 200)  # compute over bandwidth: an RTX 3090 in fp32 has 24, an H100 in bf16 185
OVERHEAD_MS: Final = Span(0.1, 4)  # a captured CUDA graph on a server; an edge board's Python and launches
HOST_DEVICES: Final = Span(1, 8)  # an edge board; a server of eight GPUs
LOCAL_GBIT_S: Final = Span(30, 2900)  # PCIe 3.0 x4; 80% of an H100's 450 GB/s of NVLink each way
LOCAL_MS: Final = Span(0.005, 0.1)  # peer to peer; relayed through the host's memory by the CPU
NETWORK_GBIT_S: Final = Span(0.09, 94)  # 94% of fast Ethernet, and of 100 Gbit/s
NETWORK_MS: Final = Span(0.01, 5)  # RDMA through one switch; Wi-Fi, or another site in the same town
# Elements of a hidden state.
HIDDEN_SIZES: Final = (2048, 3072, 4096, 5120, 6144, 8192)  # Llama's and Qwen's between 1B and 70B
# Names in PRICES of the independent draft models that a cluster may have, besides an EAGLE head of its model.
DRAFT_MODELS: Final = ("llama-160m-fp16", "tinyllama-1.1b-fp16", "llama-3.2-1b-fp32")


def drawn_table(seed: int, stages: int | None = None) -> dict[str, Any]:
    """The table of a drawn cluster's file, the same for the same arguments everywhere.

    ``stages``: 2 to 128; None draws the number, too.

    Raises FieldError for a number of stages out of range or a seed below 0.
    """
    check(seed >= 0, "seed", seed, "0 or above")
    if stages is not None:
        check(MIN_STAGES <= stages <= MAX_STAGES, "stages", stages, f"between {MIN_STAGES} and {MAX_STAGES}")
    rng = Random(seed)
    # Every draw advances one generator: another order of the calls below would give every seed another cluster.
    # Drawn even if it is stated, so that stating the number that would be drawn gives the same cluster.
    drawn = round(Span(MIN_STAGES, MAX_STAGES).draw(rng))
    count = drawn if stages is None else stages
    model = drawn_model(rng, count)
    devices = drawn_devices(rng, count)
    layers = split_by_speed(model.layers, [device["weight_bandwidth_gb_s"] for device in devices[:-1]])
    return {
        "name": f"random-{seed}" if stages is None else f"random-{seed}:{stages}",
        "description": f"{count} unlike stages, drawn at random from seed {seed}",
        "as_model": model,
        "draft_as_model": rng.choice([eagle(model), *(PRICES[name] for name in DRAFT_MODELS)]),
        "drafter": devices[-1]["name"],
        "devices": devices,
        "stages": [{"devices": [device["name"]], "layers": n} for device, n in zip(devices[:-1], layers, strict=True)],
        "links": drawn_links(rng, list(dict.fromkeys(device["host"] for device in devices))),
    }


def drawn_model(rng: Random, stages: int) -> ModelPrice:
    """A model of Llama-3's proportions (intermediate 3.5 x hidden, 8 key and value heads of 128)."""
    hidden = rng.choice(HIDDEN_SIZES)
    return llama(
        layers=max(stages, round(LAYERS.draw(rng))),
        hidden=hidden,
        intermediate=7 * hidden // 2,
        key_value=1024,
        key_value_heads=8,
        vocabulary=128256,
        bits=rng.choice((4, 16, 32)),
    )


def drawn_devices(rng: Random, stages: int) -> list[dict[str, Any]]:
    """One device per stage, several to a host, and the drafter on a host of its own as the last."""
    per_host = round(HOST_DEVICES.draw(rng))
    bandwidths, overheads = WEIGHT_BANDWIDTH_GB_S.part(rng), OVERHEAD_MS.part(rng)
    places = [(f"device-{i + 1}", f"host-{i // per_host + 1}") for i in range(stages)]
    return [drawn_device(rng, *place, bandwidths, overheads) for place in [*places, ("drafter", "draft-host")]]


def drawn_device(rng: Random, name: str, host: str, bandwidths: Span, overheads: Span) -> dict[str, Any]:
    """A device's entry in the table: bandwidth and overhead from the cluster's spans, compute in proportion."""
    bandwidth = bandwidths.draw(rng)
    return {
        "name": name,
        "host": host,
        "weight_bandwidth_gb_s": bandwidth,
        "compute_tflops": three_digits(bandwidth * OPERATIONS_PER_BYTE.draw(rng) / 1e3),
        "overhead_ms": overheads.draw(rng),
    }


def drawn_links(rng: Random, hosts: Sequence[str]) -> dict[str, Any]:
    """The table of links: one for all pairs inside a host, and one for each pair of hosts in a ring.

    The ring has the stages' hosts in order and the drafter's. Other pairs, such as those that carry features from each
    stage to the drafter, are as slow as the slowest in the ring.
    """
    gbit_s, milliseconds = NETWORK_GBIT_S.part(rng), NETWORK_MS.part(rng)
    # Sorted pairs in a dict: a ring of two hosts has one link, which serves both directions.
    ring = dict.fromkeys(tuple(sorted(pair)) for pair in zip(hosts, [*hosts[1:], hosts[0]], strict=True))
    local = drawn_link(rng, LOCAL_GBIT_S, LOCAL_MS)
    links = [drawn_link(rng, gbit_s, milliseconds) for _ in ring]
    slowest = {
        "bandwidth_gbit_s": min(link["bandwidth_gbit_s"] for link in links),
        "latency_ms": max(link["latency_ms"] for link in links),
    }
    between = [{"ends": pair, **link} for pair, link in zip(ring, links, strict=True)]
    return {"local": local, "network": slowest, "between": between}


def drawn_link(rng: Random, gbit_s: Span, milliseconds: Span) -> dict[str, float]:
    """A link's rate in 1e9 bits/s and its latency in milliseconds."""
    return {"bandwidth_gbit_s": gbit_s.draw(rng), "latency_ms": milliseconds.draw(rng)}


def split_by_speed(layers: int, speeds: Sequence[float]) -> list[int]:
    """Layers per stage, at least 1 each, such that the slowest stage is as fast as it can be.

    ``speeds`` are relative. Each layer goes to the stage that would be done first with it, so that counts are
    proportional to speed, but for rounding.
    """
    counts = [1] * len(speeds)
    for _ in range(layers - len(speeds)):
        # min() gives the first of equals, so that remainders go to the first stages.
        counts[min(range(len(speeds)), key=lambda i: (counts[i] + 1) / speeds[i])] += 1
    return counts


def three_digits(number: float) -> float:
    """The number rounded to three significant digits."""
    return float(f"{number:.3g}")


# -------------------------------------------------------------------------------------------------------------- uniform
# Makes clusters of any number of stages that are all like the first stage of another cluster, to see how times grow.


def uniform_cluster(cluster: Cluster, stages: int) -> Cluster:
    """A cluster of ``stages`` stages, each with copies of the first stage's devices and as many layers as that has.

    The model grows with them (the last stage has its head, too), so that a stage takes the same time however many there
    are. Between stages lies the link from the first to the second, or in a cluster of one stage that to the engine;
    engine and drafter keep their devices, and their links to the first stage. The engine runs on the first copy where
    it ran on the first stage. A drafter that shares the last stage's device shares that of the last copy, and one that
    shares another stage's device that of the first copy. Memory is not checked. The cluster has to be emulated. Raises
    FieldError for less than one stage.
    """
    check(stages >= 1, "stages", stages, "at least 1")
    assert cluster.as_model is not None
    first = cluster.stages[0]
    names = [tuple(copy_of(name, i) for name in first.devices) for i in range(stages)]
    copies = [replace(first, devices=devices) for devices in names]
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
    """The name of a device's copy; ``index`` counts from 0, names from 1."""
    return f"{name}-{index + 1}"


def drafter_among(cluster: Cluster, copies: list[Stage]) -> str | None:
    """The drafter's device: its own or, if it shares a stage's, that of the last or the first copy."""
    if cluster.drafting_stage is None:
        return cluster.drafter
    return copies[-1 if cluster.drafting_stage == len(cluster.stages) - 1 else 0].last_device


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
    first, second = cluster.stages[0], cluster.stages[min(1, len(cluster.stages) - 1)]
    outside = cluster.link(cluster.engine, first.devices[0])
    hop = cluster.link(first.last_device, second.devices[0]) if len(cluster.stages) > 1 else outside
    found: dict[frozenset[str], Link | None] = {}
    for stage in copies:
        for (one, other), ends in zip(first.inner_hops, stage.inner_hops, strict=True):
            found[frozenset(ends)] = cluster.link(one, other)
    for stage, following in pairwise(copies):
        # Copies have hosts of their own, so that a link inside a host has to be stated between them, too.
        found[frozenset((stage.last_device, following.devices[0]))] = hop
    for end in (copies[0].devices[0], copies[-1].last_device):
        found.setdefault(frozenset((engine, end)), outside or hop)
    if cluster.drafter is not None and drafter is not None:
        found[frozenset((engine, drafter))] = cluster.link(cluster.engine, cluster.drafter)
    for between, link in found.items():
        if link is not None and len(between) == 2:  # a set of one is a device and itself
            yield LinkBetween(
                ends=tuple(sorted(between)), bandwidth_gbit_s=link.bandwidth_gbit_s, latency_ms=link.latency_ms
            )
