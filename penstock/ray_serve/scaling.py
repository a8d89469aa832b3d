"""The autoscaling policy: as many replicas as requests and their KV slots need.

Serve copies this module by value into its controller, and applies delays and bounds to what the policy wants.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class RequestsAndSlots:
    """A policy of Serve's: ``requests`` are what a replica runs at a time, ``kv_share`` (0 to 1) its slots in use."""

    def __init__(self, requests: float, kv_share: float) -> None:
        self._requests = requests
        self._kv_share = kv_share

    def __call__(self, context: Any) -> tuple[float, dict[str, Any]]:
        """The wanted number of replicas, not yet rounded, and the policy's state, of which it has none."""
        shares = latest(context.aggregated_metrics, "kv_share")
        return wanted(context.total_num_requests, shares, self._requests, self._kv_share), {}


def wanted(requests: float, shares: list[float], of_each: float, most_share: float) -> float:
    """Replicas for so many ``requests``, running or waiting, and for slots in use (``shares`` of each replica's)."""
    return max(requests / of_each, sum(shares) / most_share if requests > 0 else 0.0)


def latest(metrics: Mapping[str, Mapping[Any, float]] | None, name: str) -> list[float]:
    return list((metrics or {}).get(name, {}).values())
