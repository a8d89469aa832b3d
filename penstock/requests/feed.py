"""Writes the batches of one pipeline: what each stage behind it must be told, and which rows it still lacks."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field

from penstock.messages import NO_SLOT, Batch, Certain, Opened, Rows
from penstock.requests.request import Request
from penstock.tree import Node


@dataclass
class _Told:
    """What one pipeline knows of one request: ``certain`` slots announced, ``fed`` nodes whose rows have entered.

    All certain nodes before ``prefix`` have entered.
    """

    certain: int = 0
    prefix: int = 0
    fed: set[int] = field(default_factory=set)


class Feed:
    """The stream of one pipeline. The target's stages have one and a drafting model has another.

    A batch announces the certain slots of the requests whose rows it carries, always a prefix without holes:

        certain nodes   p0 p1 p2 p3 | c4 c5 c6        announced so far: up to |
        fed                  all      yes yes no      c6 is the root after a miss: it has yet to enter
        this batch                       rows: c6     announces c4 c5 c6
    """

    def __init__(self) -> None:
        self.next_stream = 0
        self._told: dict[int, _Told] = {}
        self._closed: list[int] = []

    def close(self, request: int) -> None:
        """The request has ended; the next batch says so."""
        if self._told.pop(request, None):
            self._closed.append(request)

    def has(self, request: Request, node: Node) -> bool:
        """Whether the node's row has entered."""
        told = self._told.get(request.number)
        return told is not None and node.id in told.fed

    def missing(self, request: Request, nodes: Iterable[Node]) -> list[Node]:
        """``nodes`` and all their ancestors whose rows have not entered yet, parents first."""
        told = self._told.get(request.number, _Told())
        wanted: dict[int, Node] = {}
        for node in nodes:
            path = []
            current: Node | None = node
            while current is not None and current.id not in told.fed and current.id not in wanted:
                path.append(current)
                current = current.parent
            wanted.update((step.id, step) for step in reversed(path))
        lacking = {node.id: node for node in request.certain[told.prefix :] if node.id not in told.fed}
        return list({**lacking, **wanted}.values())

    def batch(
        self,
        entries: Sequence[tuple[Request, Sequence[Node]]],
        wanted: set[int],
        candidates: int = 0,
        again: Container[int] = (),
    ) -> Batch:
        """The next batch: these rows of these requests. ``wanted`` are ids of nodes whose successor is asked for.

        ``again`` are ids of nodes that have entered before: a learned drafter's, computed anew or asked about again.
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
        told = self._told.get(request.number)
        if told is None:
            told = self._told[request.number] = _Told()
            batch.opened.append(Opened(request.number, request.sampling))
        for node in nodes:
            assert node.id not in told.fed or node.id in again, "a node enters once"
            told.fed.add(node.id)
            if node.id in wanted:
                batch.wanted.append(len(batch.rows))
            parent = request.certain[node.position - 1] if node.parent is None and node.position else node.parent
            slot = parent.slot if parent else NO_SLOT
            batch.rows.append(request.number, node.id, node.slot, slot, node.position, node.token)
        while told.prefix < len(request.certain) and request.certain[told.prefix].id in told.fed:
            told.prefix += 1
        if told.prefix > told.certain:
            slots = [node.slot for node in request.certain[told.certain : told.prefix]]
            batch.certain.append(Certain(request.number, slots))
            told.certain = told.prefix
