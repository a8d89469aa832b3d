"""Who is admitted next: fair among clients, earlier for the more important, and nobody waits for ever."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from typing import Final

from penstock.requests.request import Request

PRIORITY_TOKENS: Final = 65_536
"""How many tokens' worth of requests one step of priority goes before."""
CLIENTS: Final = 1024
"""Clients whose share is remembered: a service may have a new one with every request."""


class FairQueue:
    """Start-time fair queueing (Goyal et al., 1996) over tokens, prompt and answer alike.

    A request's tag is where its client's last one ends, or the tag of what was taken last, whichever is later: a client
    with many requests queues behind its own. One client alone is served in the order of arrival. A priority moves the
    tag, by a bounded number of tokens: what waits comes to the front at last, whatever arrives.
    """

    def __init__(self) -> None:
        self._queue: list[tuple[float, int, Request]] = []
        self._tags: dict[int, tuple[float, int]] = {}
        """By request number, of those that have not ended: a preempted request keeps its place."""
        self._ends: dict[str, float] = {}
        """By client, where its last request ends; of too many those go that end first."""
        self._now = 0.0
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Request]:
        return (request for _, _, request in self._queue)

    def __contains__(self, request: Request) -> bool:
        return any(waiting is request for waiting in self)

    def add(self, request: Request) -> None:
        """Queue a request; one that has been taken before at its old place."""
        if request.number not in self._tags:
            self._arrivals += 1
            begin = max(self._now, self._ends.get(request.client, 0.0))
            self._ends[request.client] = begin + request.slots_needed
            if len(self._ends) > CLIENTS:
                del self._ends[min(self._ends, key=self._ends.__getitem__)]
            self._tags[request.number] = begin + request.priority * PRIORITY_TOKENS, self._arrivals
        insort(self._queue, (*self._tags[request.number], request))

    def first(self) -> Request:
        return self._queue[0][2]

    def take(self) -> Request:
        tag, _, request = self._queue.pop(0)
        self._now = max(self._now, tag - request.priority * PRIORITY_TOKENS)
        self._ends = {client: end for client, end in self._ends.items() if end > self._now}
        return request

    def order(self, request: Request) -> tuple[float, int]:
        """What the queue sorts by: of those that run, the last in this order is the first to give way."""
        return self._tags[request.number]

    def forget(self, request: Request) -> None:
        """The request has ended."""
        if self._tags.pop(request.number, None):
            self._queue = [entry for entry in self._queue if entry[2] is not request]
