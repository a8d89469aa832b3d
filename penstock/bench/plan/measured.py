"""A cluster to plan for, from measurements of ``penstock doctor``: one device of each host, and the links."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from penstock.cluster.load import ClusterFile, cluster_of
from penstock.cluster.prices import ModelPrice, eagle
from penstock.cluster.spec import Cluster, Stage
from penstock.config import FieldError, parse
from penstock.core import ConfigError
from penstock.hosts.doctor.report import DeviceRates, ExaminedHost, LinkRates, Report

OVERHEAD_MS: Final = 0.5
"""Assumed milliseconds per batch on any device: Python and messages take about as long."""
ENGINE: Final = "localhost"


def measured_cluster(report: Report, model: ModelPrice) -> Cluster:
    """A cluster of every host that was measured, with its fastest device. Raises ConfigError where there is none.

    The engine is on this host and drafts with a head like EAGLE's. A link has the worse figures of its two directions.
    """
    fastest = {host.host: fastest_of(host) for host in report.hosts if host.rates}
    if not fastest:
        problems = "; ".join(f"{host.host}: {host.problem or 'nothing measured'}" for host in report.hosts)
        raise ConfigError(f"doctor: no host was measured: {problems}")
    devices = [device_table(host, fastest[host.host]) for host in report.hosts if host.host in fastest]
    here = ENGINE if ENGINE in fastest else devices[0]["name"]
    table = {
        "name": "measured",
        "description": "hosts that penstock doctor has measured",
        "devices": devices,
        "stages": [{"devices": [device["name"]]} for device in devices],
        "engine": here,
        "links": {"between": links_between(report.links, list(fastest))},
    }
    try:
        file = parse(ClusterFile, {**table, "drafter": here})
        cluster = cluster_of(file, model, tuple(Stage(devices=stage.devices) for stage in file.stages))
    except FieldError as error:
        raise ConfigError(f"doctor: {error}") from None
    return replace(cluster, draft_as_model=eagle(model))


def fastest_of(host: ExaminedHost) -> DeviceRates:
    return max(host.rates, key=lambda rate: rate.weight_bandwidth_gb_s)


def device_table(host: ExaminedHost, rates: DeviceRates) -> dict[str, Any]:
    found = host.facts.device(rates.device) if host.facts is not None else None
    memory = {"memory_gb": found.free / 1e9} if found is not None and found.free is not None else {}
    return {
        "name": host.host,
        "host": host.host,
        "weight_bandwidth_gb_s": rates.weight_bandwidth_gb_s,
        "compute_tflops": rates.compute_tflops,
        "overhead_ms": OVERHEAD_MS,
        **memory,
    }


def links_between(links: list[LinkRates], hosts: list[str]) -> list[dict[str, Any]]:
    """A table for every two hosts that reach each other."""
    ways: dict[tuple[str, ...], list[tuple[float, float]]] = {}
    for link in links:
        if link.latency_ms is not None and link.bandwidth_gbit_s and {link.source, link.to} <= set(hosts):
            ends = tuple(sorted((link.source, link.to)))
            ways.setdefault(ends, []).append((link.bandwidth_gbit_s, link.latency_ms))
    return [
        {"ends": ends, "bandwidth_gbit_s": min(rate for rate, _ in both), "latency_ms": max(ms for _, ms in both)}
        for ends, both in ways.items()
    ]
