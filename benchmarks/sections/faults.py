"""Faults and attacks: requests of all kinds, processes killed, hosts lost or without weights, hostile input."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

from benchmarks.load import chaos, networks, replicas
from benchmarks.load.killing.victims import SERVER
from benchmarks.sections.base import Section

HAPPENED = {
    "link-down": "a host's link goes down",
    "one-way": "what the first stage's host sends to the second's does not arrive",
    "other-way": "what the second stage's host sends to the first's does not arrive",
    "stopped-host": f"all processes of a host stop for {networks.STOPPED_S:.0f} s",
    "stopped-stage": f"a stage's process stops for {networks.STOPPED_S:.0f} s",
}
PROCESSES = {
    "agent": ("a worker's agent", "leases ended with a reason", "ended with a reason"),
    "head": ("the head", "hosts lost with a reason", "lost with a reason"),
    "stage": ("stages, and the engine", "recoveries", "recoveries"),
    "drafter": ("drafter, and the engine", "drafters lost", "drafter_losses"),
}
"""The process, what became of it, and the field of its figures that counts that."""


def problems(figures: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"problems": "; ".join(problem for found in figures.values() for problem in found["problems"]) or "nothing"}


def soak_values(figures: Any) -> Mapping[str, Any]:
    return {"left": sum(count for kind, count in figures["kinds"].items() if kind.startswith("leaves"))}


def chaos_values(portions: Any) -> Mapping[str, Any]:
    """The sums, and the pauses of all but the fork server, whose stages go on until the engine has noticed."""
    sums = chaos.together(portions.values())
    pauses = dict(sums["pauses"])
    servers = pauses.pop(SERVER, {"kills": 0})["kills"]
    return {"sums": sums, "pauses": pauses, "servers": servers}


def returns_values(seeds: Any) -> Mapping[str, Any]:
    def total(key: str) -> int:
        return sum(found[key] for found in seeds.values())

    back_s = sorted(seconds for found in seeds.values() for seconds in found["back_s"])
    mbit = [rate for found in seeds.values() for rate in found["mbit"]]
    return {**problems(seeds), "total": total, "back_s": back_s, "mbit": mbit}


def replicas_values(portions: Any) -> Mapping[str, Any]:
    """The sums of the fewest engines, which had by far the most portions, and those of more engines."""
    (engines, sums), *more = replicas.by_engines(portions).items()
    return {"engines": engines, "sums": sums, "more": more}


def networks_values(figures: Any) -> Mapping[str, Any]:
    """The events in words, the most connections without a token that stayed open, and MiB that a process grew by."""
    crowds = figures.get("crowds", {"became": {}, "grown": {}})
    held = [
        found["held"]
        for port in crowds["became"].values()
        for kind, found in port.items()
        if kind != "a member, half a frame"  # it has shown its token
    ]
    grown = [mib for mib, _ in crowds["grown"].values()]
    extremes = {"most_held": max(held, default=0), "most_grown": max(grown, default=0)}
    return {**problems(figures), "happened": HAPPENED, **extremes}


SECTIONS = {
    "soak": Section(values=soak_values),
    "chaos": Section(values=chaos_values),
    "replicas": Section(values=replicas_values),
    "networks": Section(values=networks_values),
    "ray_serve": Section(values=lambda figures: {"all_s": median(one["all_s"] for one in figures["starts"])}),
    "returns": Section(values=returns_values),
    "members": Section(values=lambda figures: {**problems(figures), "processes": PROCESSES}),
    "sent_weights": Section(values=problems),
    "emulated_hosts": Section(values=lambda figures: {"median": median}),
}
