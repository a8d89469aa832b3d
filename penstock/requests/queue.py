"""The queue of requests: fair among clients, earlier for higher priority, and without starvation."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from typing import Final

from penstock.requests.request import Request

PRIORITY_TOKENS: Final = 65_536
"""Tokens by which one step of priority moves a request forward in the queue."""
CLIENTS: Final = 1024
"""Most clients whose share is remembered: a service may have a new client with every request."""


class FairQueue:
    """Start-time fair queueing (Goyal et al., 1996) over tokens, prompt and answer alike.

    A request's tag is the later one of two: where its client's last request ends, or the tag of the request taken last.
    A client with many requests therefore queues behind itself. A single client is served in the order of arrival. A
    priority moves the tag by a bounded number of tokens, so that every request reaches the front at last.
    """

    def __init__(self) -> None:
        self._queue: list[tuple[float, int, Request]] = []
        self._tags: dict[int, tuple[float, int]] = {}
        """Tag and arrival of each request that has not ended, by number: a preempted request keeps its place."""
        self._ends: dict[str, float] = {}
        """End of each client's last request, in tokens. Of too many clients, the one that ends first is dropped."""
        self._now = 0.0
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Request]:
        return (request for _, _, request in self._queue)

    def __contains__(self, request: Request) -> bool:
        return any(waiting is request for waiting in self)

    def add(self, request: Request) -> None:
        """Queue a request. A preempted one returns to its old place."""
        if request.number not in self._tags:
            self._arrivals += 1
            begin = max(self._now, self._ends.get(request.client, 0.0))
            self._ends[request.client] = begin + request.slots_needed
            if len(self._ends) > CLIENTS:
                del self._ends[min(self._ends, key=self._ends.__getitem__)]
            self._tags[request.number] = begin + request.priority * PRIORITY_TOKENS, self._arrivals
        # Every arrival has its own number, so that requests themselves are never compared.
        insort(self._queue, (*self._tags[request.number], request))

    def first(self) -> Request:
        return self._queue[0][2]

    def take(self) -> Request:
        tag, _, request = self._queue.pop(0)
        # Without the priority's shift, which moves one request and not the queue's time.
        self._now = max(self._now, tag - request.priority * PRIORITY_TOKENS)
        # A client whose last request ends before now would begin now in any case.
        self._ends = {client: end for client, end in self._ends.items() if end > self._now}
        return request

    def order(self, request: Request) -> tuple[float, int]:
        """The request's sort key. Of the running requests, the last one in this order is preempted first."""
        return self._tags[request.number]

    def forget(self, request: Request) -> None:
        """Remove a request that has ended."""
        if self._tags.pop(request.number, None):
            self._queue = [entry for entry in self._queue if entry[2] is not request]
