"""Prices other layers on devices whose pass over their own layers was measured."""

from __future__ import annotations

from dataclasses import replace

from penstock.cluster.prices import ModelPrice
from penstock.cluster.spec import Cluster, Device, Stage


def with_rates(cluster: Cluster, stages: tuple[Stage, ...], model: ModelPrice) -> Cluster:
    """The cluster with a rate in place of every ``pass_ms``: the one that reads the device's layers in that time.

    ``stages`` say for which layers of ``model`` each pass was measured. A pass is thus assumed to grow with the weights
    that it reads. A device without layers gets the rate of one of its kind; if there is none, it stays as it is.
    """
    last = stages[-1].devices[-1]
    rates: dict[str, float] = {}
    by_kind: dict[str, float] = {}
    for stage in stages:
        for name, layers in zip(stage.devices, stage.layers, strict=True):
            device = cluster.device(name)
            if device.pass_ms is not None:
                # Bytes per millisecond are 1e-6 times 1e9 bytes/s.
                rates[name] = model.weight_bytes(layers, head=name == last) / device.pass_ms / 1e6
                by_kind.setdefault(device.kind or name, rates[name])
    return replace(
        cluster,
        devices=tuple(
            with_rate(one, rates.get(one.name, by_kind.get(one.kind or one.name))) for one in cluster.devices
        ),
    )


def with_rate(device: Device, gb_s: float | None) -> Device:
    """The device with a rate of ``gb_s`` (1e9 bytes/s) in place of its pass, if it states one."""
    if device.pass_ms is None or gb_s is None:
        return device
    return replace(device, pass_ms=None, weight_bandwidth_gb_s=gb_s, overhead_ms=0.0)
