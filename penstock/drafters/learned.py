"""Learned drafters: modules that read the target's features, run as a pipeline of one stage."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from penstock.drafters.base import Draft, DrafterOptions, DrafterParts, DraftRequest, Weights
from penstock.drafters.small_model import Entries, SmallModelDrafter
from penstock.messages import Batch, Cancel
from penstock.pipeline.base import Pipeline
from penstock.requests.request import Request
from penstock.tree import Node


class LearnedDrafter(SmallModelDrafter):
    """A small-model drafter whose rows may wait for features of the target's stages and may be computed again.

    A row is final once it is computed, or about to be, with everything that can be known about its node.
    """

    def __init__(self, pipeline: Pipeline, chunk: int) -> None:
        super().__init__(pipeline, chunk)
        self._again: set[int] = set()
        self._waiting: dict[int, list[Node]] = {}
        """Nodes whose rows may still wait for features, by request."""
        self._final: dict[int, int] = {}
        """Number of leading committed nodes whose rows are final, by request."""
        self._final_in: dict[int, int] = {}
        """The node whose row in a slot is final, by slot. Requests that share a block share this."""

    @property
    def reads_target(self) -> bool:
        return True

    def ask(self, asks: Sequence[DraftRequest]) -> int:
        self._again.clear()
        return super().ask(asks)

    def poll(self) -> list[Draft]:
        """Answers that have arrived, as for any drafter. Rows of dead nodes are cancelled, since no feature will come
        for them."""
        for request, nodes in self._waiting.items():
            if dead := [node for node in nodes if not node.alive]:
                self._cancel(dead)
                self._waiting[request] = [node for node in nodes if node.alive]
        return super().poll()

    def forget(self, request: Request) -> None:
        super().forget(request)
        self._final.pop(request.number, None)
        if waiting := self._waiting.pop(request.number, None):
            self._cancel(waiting)

    def _batch(self, entries: Entries, count: int) -> Batch:
        if not self._outstanding:
            # With nothing in flight no row can be waiting for features.
            self._waiting.clear()
        batch = self._builder.batch(entries, set(self._asked), count, self._again)
        for request, nodes in entries:
            self._waiting.setdefault(request.number, []).extend(nodes)
        return batch

    def _cancel(self, nodes: Sequence[Node]) -> None:
        self.pipeline.cancel(Cancel(before=self._builder.next_stream, nodes=[node.id for node in nodes]))
        self._builder.drop(nodes)
        for node in nodes:
            self._final_in.pop(node.slot, None)

    def _finalize(self, request: Request, count: int) -> list[Node]:
        """Those of the first ``count`` committed nodes without a final row; the caller has to have them
        computed now."""
        if request.number not in self._final:
            # A shared prefix may have final rows already, computed for another request in the same slots.
            shared = itertools.takewhile(lambda node: self._final_in.get(node.slot) == node.id, request.committed)
            self._final[request.number] = sum(1 for _ in shared)
        nodes = request.committed[self._final[request.number] : count]
        self._final[request.number] = count
        self._final_in.update((node.slot, node.id) for node in nodes)
        return nodes


@dataclass(frozen=True, kw_only=True)
class LearnedOptions(DrafterOptions):
    weights = Weights.SPECULATOR
    priced_as = Weights.SPECULATOR

    model: str | None = None
    """Folder or hub name of the learned drafter; those that come with the package's own target need none."""
    quantization: Literal["auto", "none", "int8", "int4"] = "auto"
    """Whole numbers that its weights are held as on a CPU; auto: int8 where it computes in float32 on a real CPU. What
    is answered does not depend on it: it may only be right more seldom."""


@dataclass(frozen=True, kw_only=True)
class FollowingOptions(LearnedOptions):
    def start(self, parts: DrafterParts) -> FollowingDrafter:
        return FollowingDrafter(parts.start_weights(), parts.chunk)


@dataclass(frozen=True, kw_only=True)
class MtpOptions(FollowingOptions):
    of_target = True

    model: str | None = None
    """Folder of an MTP head that was trained apart (``penstock train mtp``). The target's own needs none."""


class FollowingDrafter(LearnedDrafter):
    """The drafter of EAGLE, Medusa and MTP modules, whose rows each need their parent's feature.

    Committed nodes have gone through the target, so that their features are under way at the latest, and rows wait for
    them. A row below the root does not wait: where its parent is still in flight, the module's own output takes the
    place of the feature. Once such a row is committed, it is computed again with the target's feature (EAGLE, section
    4.2: the features of accepted tokens replace the drafted ones), and later drafts see the better keys.
    """

    def _rows(self, ask: DraftRequest) -> list[Node]:
        request = ask.request
        anew = {node.id: node for node in [*self._finalize(request, len(request.committed)), *ask.nodes]}
        again = [node for node in anew.values() if self._builder.has(request, node)]
        self._again.update(node.id for node in again)
        return [*again, *self._builder.missing(request, ask.nodes)]

    def _batch(self, entries: Entries, count: int) -> Batch:
        batch = super()._batch(entries, count)
        feature_nodes = {node.id: self._feature_node(request, node) for request, nodes in entries for node in nodes}
        batch.feature_nodes = [feature_nodes[node] for node in batch.rows.nodes]
        return batch

    def _feature_node(self, request: Request, node: Node) -> int:
        """The node whose feature the row has to wait for: its parent, if the target's result for it is
        known, else 0."""
        known = 0 < node.position <= request.tree.root.position
        return request.committed[node.position - 1].id if known else 0
