"""The queue of requests, and the batches of one pipeline."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from penstock.messages import NO_SLOT, Batch, CommittedSlots, Opened, Rows
from penstock.requests.request import Request
from penstock.requests.slots import BLOCK
from penstock.tree import Node

# -------------------------------------------------------------------------------------------------------- batch builder
# The batches of one pipeline: what they must tell its stages, and which rows have yet to enter.


@dataclass
class _StreamState:
    """One pipeline's knowledge of one request: ``committed`` slots announced, ids ``fed`` of nodes that have entered.

    The first ``prefix`` committed nodes have all entered. The first ``blocks`` of the request's blocks have been
    searched for nodes that entered with other requests.
    """

    committed: int = 0
    blocks: int = 0
    prefix: int = 0
    fed: set[int] = field(default_factory=set)


class BatchBuilder:
    """The builder of one pipeline's stream of batches. The target's stages have one, and a drafting model has another.

    A batch announces the committed slots of the requests whose rows it carries, always a prefix without holes:

        committed nodes   p0 p1 p2 p3 | c4 c5 c6        announced so far: up to |
        fed                  all      yes yes no      c6 is the root after a miss: it has yet to enter
        this batch                       rows: c6     announces c4 c5 c6
    """

    def __init__(self, first: int = 0) -> None:
        self.next_stream = first
        self._told: dict[int, _StreamState] = {}
        self._closed: list[int] = []
        self._holds: dict[int, int] = {}
        """The node whose row entered a slot last, by slot: requests that share its block need not enter it again."""

    def close(self, request: int) -> None:
        """Note that the request has ended; the next batch tells the stages."""
        if self._told.pop(request, None):
            self._closed.append(request)

    def has(self, request: Request, node: Node) -> bool:
        """Whether the node's row has entered."""
        return node.id in self._told_of(request).fed

    def prefix(self, request: Request) -> int:
        """Number of a request's first committed nodes that have all entered."""
        return self._told_of(request).prefix

    def drop(self, nodes: Iterable[Node]) -> None:
        """Note that these nodes entered but may never be computed: requests that share them must enter them anew."""
        for node in nodes:
            if self._holds.get(node.slot) == node.id:
                del self._holds[node.slot]

    def _told_of(self, request: Request) -> _StreamState:
        """The stream's state for a request, with the nodes of shared blocks that other requests have entered."""
        told = self._told.get(request.number) or _StreamState()
        if told.blocks < len(request.blocks):
            shared = request.committed[told.blocks * BLOCK : len(request.blocks) * BLOCK]
            told.fed.update(node.id for node in shared if self._holds.get(node.slot) == node.id)
            told.blocks = len(request.blocks)
        return told

    def missing(self, request: Request, nodes: Iterable[Node]) -> list[Node]:
        """``nodes`` and all their ancestors whose rows have not entered yet, parents first."""
        told = self._told_of(request)
        wanted: dict[int, Node] = {}
        # A path stops at the first ancestor that has entered or is already wanted: the ones above it are, too.
        for node in nodes:
            path = []
            current: Node | None = node
            while current is not None and current.id not in told.fed and current.id not in wanted:
                path.append(current)
                current = current.parent
            wanted.update((step.id, step) for step in reversed(path))
        # Committed nodes that the stream still lacks go first: all rows below attend to them.
        lacking = {node.id: node for node in request.committed[told.prefix :] if node.id not in told.fed}
        return list({**lacking, **wanted}.values())

    def batch(
        self,
        entries: Sequence[tuple[Request, Sequence[Node]]],
        wanted: set[int],
        candidates: int = 0,
        again: Container[int] = (),
    ) -> Batch:
        """The next batch, with rows for these nodes. ``wanted`` are ids of nodes whose next token is asked for.

        ``again`` are ids of nodes that may enter a second time: a learned drafter's, computed anew or asked about
        again.
        """
        batch = Batch(stream=self.next_stream, rows=Rows(), candidates=candidates)
        self.next_stream += 1
        batch.closed, self._closed = self._closed, []
        for request, nodes in entries:
            self._add(batch, request, nodes, wanted, again)
        batch.alive = list(range(len(batch.rows)))
        return batch

    def _add(
        self, batch: Batch, request: Request, nodes: Sequence[Node], wanted: set[int], again: Container[int]
    ) -> None:
        told = self._told_of(request)
        if request.number not in self._told:
            self._told[request.number] = told
            batch.opened.append(Opened(request.number, request.sampling))
        row = len(batch.rows)
        for node in nodes:
            if node.id in told.fed and node.id not in again and node.id not in wanted:
                assert node.position < told.blocks * BLOCK, "a node enters once"
                continue  # another request that shares its block has entered it since this one was composed
            told.fed.add(node.id)
            self._holds[node.slot] = node.id
            if node.id in wanted:
                batch.wanted.append(row)
            # A committed node has no parent link any more: its predecessor is the committed node one position before.
            parent = request.committed[node.position - 1] if node.parent is None and node.position else node.parent
            slot = parent.slot if parent else NO_SLOT
            batch.rows.append(request.number, node.id, node.slot, slot, node.position, node.token)
            row += 1
        # Only a prefix without holes is announced: stages take committed slots in the order of positions.
        while told.prefix < len(request.committed) and request.committed[told.prefix].id in told.fed:
            told.prefix += 1
        if told.prefix > told.committed:
            slots = [node.slot for node in request.committed[told.committed : told.prefix]]
            batch.committed.append(CommittedSlots(request.number, slots))
            told.committed = told.prefix


# ---------------------------------------------------------------------------------------------------------------- queue
# The queue of requests: fair among clients, earlier for higher priority, and without starvation.

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
        if (tag := self._tags.pop(request.number, None)) is not None:
            place = bisect_left(self._queue, tag, key=lambda entry: entry[:2])
            if place < len(self._queue) and self._queue[place][2] is request:
                del self._queue[place]
