"""A learned drafter: a module that reads the target's own features, run as a pipeline of one stage."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from penstock.drafters.base import Ask, Draft
from penstock.drafters.small_model import Entries, SmallModelDrafter
from penstock.messages import Batch, Cancel
from penstock.pipeline.base import Pipeline
from penstock.requests.request import Request
from penstock.tree import Node


class LearnedDrafter(SmallModelDrafter):
    """As a small model, but rows may have to wait for what the target's stages send, and may be computed anew."""

    def __init__(self, pipeline: Pipeline, chunk: int) -> None:
        super().__init__(pipeline, chunk)
        self._again: set[int] = set()
        self._waiting: dict[int, list[Node]] = {}
        """By request, nodes whose rows may still wait for features."""
        self._settled: dict[int, int] = {}
        """By slot, the node whose row there has been computed for good."""

    def ask(self, asks: Sequence[Ask]) -> int:
        self._again.clear()
        return super().ask(asks)

    def poll(self) -> list[Draft]:
        """As a drafter does. A row whose node has died would wait for features that nobody sends any more."""
        for request, nodes in self._waiting.items():
            if dead := [node for node in nodes if not node.alive]:
                self._cancel(dead)
                self._waiting[request] = [node for node in nodes if node.alive]
        return super().poll()

    def forget(self, request: Request) -> None:
        super().forget(request)
        if waiting := self._waiting.pop(request.number, None):
            self._cancel(waiting)

    def _batch(self, entries: Entries, count: int) -> Batch:
        if not self._outstanding:
            self._waiting.clear()
        batch = self._feed.batch(entries, set(self._asked), count, self._again)
        for request, nodes in entries:
            self._waiting.setdefault(request.number, []).extend(nodes)
        return batch

    def _cancel(self, nodes: Sequence[Node]) -> None:
        self.pipeline.cancel(Cancel(before=self._feed.next_stream, nodes=[node.id for node in nodes]))
        self._feed.drop(nodes)
        for node in nodes:
            self._settled.pop(node.slot, None)

    def _settle(self, nodes: Iterable[Node]) -> None:
        """These certain nodes are computed with all that can be known of them, now."""
        self._settled.update((node.slot, node.id) for node in nodes)

    def _settled_before(self, request: Request) -> int:
        """How many of a new request's nodes, from the first on, others who share them have had computed for good."""
        pairs = ((node.slot, node.id) for node in request.certain)
        return sum(1 for _ in itertools.takewhile(lambda pair: self._settled.get(pair[0]) == pair[1], pairs))


class FollowingDrafter(LearnedDrafter):
    """EAGLE's and Medusa's: each row needs its parent's feature.

    What is certain has gone through the target, so its features are on their way at the latest: such rows wait for
    them. A row below the root does not: where its parent is still in flight, the module's own output takes the
    feature's place. Once such a row has become certain it is computed anew with the target's (EAGLE, section 4.2: the
    accepted tokens' features replace the drafted ones), and what is drafted later sees the better keys.
    """

    def __init__(self, pipeline: Pipeline, chunk: int) -> None:
        super().__init__(pipeline, chunk)
        self._refreshed: dict[int, int] = {}
        """By request, how many of its certain nodes have been computed with the target's features."""

    def forget(self, request: Request) -> None:
        super().forget(request)
        self._refreshed.pop(request.number, None)

    def _rows(self, ask: Ask) -> list[Node]:
        request, first = ask.request, self._refreshed.get(ask.request.number)
        if first is None:
            first = self._settled_before(request)
        anew = {node.id: node for node in [*request.certain[first:], *ask.nodes]}
        again = [node for node in anew.values() if self._feed.has(request, node)]
        self._settle(request.certain[first:])
        self._refreshed[request.number] = len(request.certain)
        self._again.update(node.id for node in again)
        return [*again, *self._feed.missing(request, ask.nodes)]

    def _batch(self, entries: Entries, count: int) -> Batch:
        batch = super()._batch(entries, count)
        joins = {node.id: self._joins(request, node) for request, nodes in entries for node in nodes}
        batch.joins = [joins[node] for node in batch.rows.nodes]
        return batch

    def _joins(self, request: Request, node: Node) -> int:
        """The node whose feature the row cannot do without: its parent, if the target's result of it is known."""
        known = 0 < node.position <= request.tree.root.position
        return request.certain[node.position - 1].id if known else 0
