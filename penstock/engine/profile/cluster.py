"""Turns measured hosts into a cluster to plan for: their devices, and the links between them."""

from __future__ import annotations

from dataclasses import replace

from penstock.cluster.measured import LayerTimes
from penstock.cluster.prices import ModelPrice, eagle
from penstock.cluster.spec import Cluster, Device, Link, Links, Stage
from penstock.engine.profile.devices import Candidate
from penstock.engine.profile.hosts import HostsProfile
from penstock.engine.profile.stages import LOCAL_BYTES_PER_S, LOCAL_S
from penstock.hosts.placement import HERE


def cluster_of_hosts(profile: HostsProfile, *, drafts: bool) -> Cluster:
    """The measured hosts as a cluster. The engine is on this host, and so is an EAGLE-like drafter if it ``drafts``.

    If this host is not among them, it is assumed to be like the first. Everything has to have been measured.
    """
    found, price, links = profile.candidates, profile.candidates.price, profile.links
    assert links is not None, "nothing is missing"
    devices = [measured_device(one, profile.times[name], price) for name, one in found.devices.items()]
    if HERE not in found.hosts:
        devices.append(replace(devices[0], name=HERE, host=HERE, memory_gb=None, measured=None))
    here = next(device.name for device in devices if device.host == HERE)
    within = Link(bandwidth_gbit_s=8 * LOCAL_BYTES_PER_S / 1e9, latency_ms=1e3 * LOCAL_S)
    return Cluster(
        name="hosts",
        description="hosts that penstock profile has measured",
        devices=tuple(devices),
        links=Links(local=within, between=tuple(links)),
        stages=tuple(Stage(devices=(name,)) for name in found.names),
        engine=here,
        drafter=here if drafts else None,
        as_model=price,
        draft_as_model=eagle(price) if drafts else None,
        kv_slots=found.capacity,
    )


def measured_device(candidate: Candidate, times: LayerTimes, price: ModelPrice) -> Device:
    """The candidate with its measured layer times, and with rates derived from them, which price a drafter there."""
    one_s, many_s = times.layer_ms[0][0] / 1e3, times.layer_ms[-1][0] / 1e3
    return Device(
        name=candidate.label,
        host=candidate.name,
        memory_gb=None if candidate.free is None else max(1, candidate.free) / 1e9,  # a cluster has no device of 0 GB
        weight_bandwidth_gb_s=price.weight_bytes(1, head=False) / one_s / 1e9,
        compute_tflops=price.row_operations(1, head=False) * times.rows[-1] / many_s / 1e12,
        overhead_ms=times.stage_ms[0],
        measured=times,
    )
