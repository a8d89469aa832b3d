"""Devices whose pass over their own layers was measured, for other layers."""

from __future__ import annotations

from dataclasses import replace

from penstock.cluster.prices import ModelPrice
from penstock.cluster.spec import Cluster, Device, Stage


def with_rates(cluster: Cluster, stages: tuple[Stage, ...], model: ModelPrice) -> Cluster:
    """The cluster with a rate in place of every ``pass_ms``: that at which its layers' weights come to the pass.

    ``stages`` say which layers of ``model`` a pass was measured for. So a pass is taken to grow with the weights that
    it reads, whatever it is made of. A device without layers has the rate of one of its kind; without one it stays.
    """
    last = stages[-1].devices[-1]
    rates: dict[str, float] = {}
    by_kind: dict[str, float] = {}
    for stage in stages:
        for name, layers in zip(stage.devices, stage.layers, strict=True):
            device = cluster.device(name)
            if device.pass_ms is not None:
                rates[name] = model.weight_bytes(layers, head=name == last) / device.pass_ms / 1e6
                by_kind.setdefault(device.kind or name, rates[name])
    return replace(
        cluster,
        devices=tuple(
            with_rate(one, rates.get(one.name, by_kind.get(one.kind or one.name))) for one in cluster.devices
        ),
    )


def with_rate(device: Device, gb_s: float | None) -> Device:
    """The device with a rate of so many 1e9 bytes/s in place of its pass, if it states one."""
    if device.pass_ms is None or gb_s is None:
        return device
    return replace(device, pass_ms=None, weight_bandwidth_gb_s=gb_s, overhead_ms=0.0)
