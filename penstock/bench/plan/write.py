"""A cluster as a file that ``load_cluster`` reads."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import tomli_w

from penstock.cluster.spec import Cluster

WRITTEN_ONLY_WITH_KINDS = "kind"
"""The field of a device that is not written, because its kind's numbers are written on the device itself."""


def cluster_toml(cluster: Cluster) -> str:
    """The file's text: every number on its device, prices as tables."""
    table = without_none(dataclasses.asdict(cluster))
    for device in table["devices"]:
        device.pop(WRITTEN_ONLY_WITH_KINDS, None)
    return tomli_w.dumps(table)


def without_none(value: Any) -> Any:
    """A value without its None entries, since TOML has no null. Tuples become lists."""
    if isinstance(value, Mapping):
        return {key: without_none(one) for key, one in value.items() if one is not None}
    if isinstance(value, tuple | list):
        return [without_none(one) for one in value]
    return value
