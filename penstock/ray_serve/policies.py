"""The policies that Ray Serve runs: its (alpha) request router around ``routing.ranked``, and autoscaling.

Serve copies this module by value into the processes that route and scale, so it keeps no state of its own;
``routing``, which has the replicas' reports, is imported.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from penstock.ray_serve.remote import RemoteCall


class PrefixRouter(RequestRouter):  # type: ignore[misc]
    """Prefers the replica whose prefix cache has most of the prompt, unless it has much more to do than others."""

    def initialize_state(self, **_: Any) -> None:
        from penstock.ray_serve import routing
        from penstock.requests.slots import block_hashes

        self._routing = routing
        self._hashes = block_hashes
        self._reports = routing.REPORTS
        self._known: dict[str, routing.Known] = {}
        self._calls: dict[str, str] = {}
        """The replica of each request that was sent and has not ended, by Serve's id of the request."""

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        from penstock.ray_serve.routing import Report

        super().update_replicas(replicas)
        found = {one.replica_id.unique_id: Report.of(one.routing_stats) for one in replicas}
        self._known = {name: self._known.get(name) or self._routing.Known() for name in found}
        for name, report in found.items():
            self._known[name].note_report(report)
        self._reports.update(found)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Each candidate in a rank of its own, the best first: Serve takes the first that has room."""
        candidates = {one.replica_id.unique_id: one for one in candidate_replicas}
        names = list(candidates)
        random.shuffle(names)  # equal ones take turns
        prompt = prompt_of(pending_request)
        known = {name: self._known.get(name) or self._routing.Known() for name in names}
        return [[candidates[name]] for name in self._routing.ranked(prompt, known)]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        name = replica_id.unique_id
        if name in self._known:
            self._known[name].note_sent(list(self._hashes(prompt_of(pending_request))))
            self._calls[pending_request.metadata.internal_request_id] = name

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        name = self._calls.pop(internal_request_id, None)
        if name in self._known:
            self._known[name].note_ended()


def prompt_of(pending: PendingRequest | None) -> list[int]:
    """The prompt of a request to a replica; empty for other calls."""
    call = pending.args[0] if pending is not None and pending.args else None
    return call.token_ids if isinstance(call, RemoteCall) else []


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
