"""The request router that Ray Serve runs in the ingress: Serve's (alpha) interface around ``routing.ranked``.

Serve copies this module by value into the process that routes, so it keeps no state of its own; ``state`` is imported.
"""

from __future__ import annotations

import random
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from penstock.ray_serve.messages import RemoteCall


class PrefixRouter(RequestRouter):  # type: ignore[misc]
    """Prefers the replica whose prefix cache has most of the prompt, unless it has much more to do than others."""

    def initialize_state(self, **_: Any) -> None:
        from penstock.ray_serve import routing, state
        from penstock.requests.slots import block_hashes

        self._routing = routing
        self._hashes = block_hashes
        self._reports = state.REPORTS
        self._known: dict[str, routing.Known] = {}
        self._calls: dict[str, str] = {}
        """The replica of each request that was sent and has not ended, by Serve's id of the request."""

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        from penstock.ray_serve.reports import Report

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
