"""What of a Ray cluster's resources an engine asks for: as few nodes as hold its stages evenly, a bundle on each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from penstock.core import ConfigError

DEVICE: Final = "penstock"
"""A resource that nodes may have, one for each device that is to hold a stage (`ray start --resources`)."""

Resources = Mapping[str, float]


def bundles_for(nodes: Sequence[Resources], stages: int, device: str) -> list[dict[str, float]]:
    """A bundle for each node that is needed. ``nodes``: what each has, in use or not.

    On GPUs there is one for each stage; else a unit of DEVICE, or, where no node has that, one node or its share for
    each. Raises ConfigError where the nodes have too few.
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
