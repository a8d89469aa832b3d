"""The resources for which an engine asks Ray: as few nodes as hold its stages evenly, with a bundle on each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from penstock.core import ConfigError

DEVICE: Final = "penstock"
"""A resource that nodes may state (`ray start --resources`): one unit for each device that is to hold a stage."""

Resources = Mapping[str, float]


def bundles_for(nodes: Sequence[Resources], stages: int, device: str) -> list[dict[str, float]]:
    """A bundle for each node that is needed. ``nodes``: the resources of each, in use or not.

    A stage takes one GPU; on CPUs it takes one unit of DEVICE or, if no node states any, a node that it may share.
    Raises ConfigError if the nodes have too few.
    """
    resource = "GPU" if device != "cpu" else DEVICE if any(DEVICE in node for node in nodes) else "CPU"
    if resource == "CPU":
        used = min(stages, sum(node.get("CPU", 0) >= 1 for node in nodes))
        if used:
            return [{"CPU": 1.0}] * used
    units = sorted((int(node.get(resource, 0)) for node in nodes), reverse=True)
    for count in range(1, len(units) + 1):
        each = -(-stages // count)
        if units[count - 1] >= each:
            return [{resource: float(each)}] * count
    raise ConfigError(f"hosts: {stages} stages need {resource}s evenly on Ray's nodes, which have {units}")
