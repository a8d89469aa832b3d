"""The policies that Ray Serve runs: its request router (an alpha API) around ``routing.ranked``, and autoscaling.

Serve copies this module by value into the processes that route and scale, so that it must keep no state of its own.
``routing``, which has the replicas' reports, is imported there.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from penstock.ray_serve.remote import RemoteCall


class PrefixRouter(RequestRouter):  # type: ignore[misc]
    """Prefers the replica whose prefix cache has most of the prompt, unless its load is much above that of others."""

    def initialize_state(self, **_: Any) -> None:
        """Make the router's state, in the process that routes: Serve calls this in place of a constructor."""
        from penstock.ray_serve import routing
        from penstock.requests.slots import block_hashes

        self._routing = routing
        self._hashes = block_hashes
        self._reports = routing.REPORTS
        self._known: dict[str, routing.Known] = {}
        self._calls: dict[str, str] = {}
        """The replica of each request that has been sent and has not ended, by Serve's id of the request."""

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Take the present replicas, with their last reports."""
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
        """Each candidate in a rank of its own, the best first: Serve takes the first one that has room."""
        candidates = {one.replica_id.unique_id: one for one in candidate_replicas}
        names = list(candidates)
        random.shuffle(names)  # so that equal ones, which the stable sort leaves in this order, take turns
        prompt = prompt_of(pending_request)
        known = {name: self._known.get(name) or self._routing.Known() for name in names}
        return [[candidates[name]] for name in self._routing.ranked(prompt, known)]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Note that the request was sent to the replica."""
        name = replica_id.unique_id
        if name in self._known:
            self._known[name].note_sent(list(self._hashes(prompt_of(pending_request))))
            self._calls[pending_request.metadata.internal_request_id] = name

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Note that the request has ended."""
        name = self._calls.pop(internal_request_id, None)
        if name in self._known:
            self._known[name].note_ended()


def prompt_of(pending: PendingRequest | None) -> list[int]:
    """The token ids of the prompt of a request to a replica; [] for other calls."""
    call = pending.args[0] if pending is not None and pending.args else None
    return call.token_ids if isinstance(call, RemoteCall) else []


class RequestsAndSlots:
    """A scaling policy of Serve. ``requests``: those a replica runs at a time; ``kv_share``: slots in use, 0 to 1."""

    def __init__(self, requests: float, kv_share: float) -> None:
        self._requests = requests
        self._kv_share = kv_share

    def __call__(self, context: Any) -> tuple[float, dict[str, Any]]:
        """The wanted number of replicas, not rounded, and the policy's state, which is always empty."""
        shares = latest(context.aggregated_metrics, "kv_share")
        return wanted(context.total_num_requests, shares, self._requests, self._kv_share), {}


def wanted(requests: float, shares: list[float], of_each: float, most_share: float) -> float:
    """The number of replicas for so many ``requests``, running or waiting, and for each replica's share of used slots.

    ``of_each``: requests that a replica runs at a time. ``most_share``: the share of slots that may be in use, 0 to 1.
    """
    return max(requests / of_each, sum(shares) / most_share if requests > 0 else 0.0)


def latest(metrics: Mapping[str, Mapping[Any, float]] | None, name: str) -> list[float]:
    """The last value of a metric from each replica."""
    return list((metrics or {}).get(name, {}).values())
