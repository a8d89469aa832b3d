"""A learned drafter: a module that reads the target's own features, run as a pipeline of one stage."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from penstock.drafters.base import Draft, DraftRequest
from penstock.drafters.options import DrafterOptions, DrafterParts, Weights
from penstock.drafters.small_model import Entries, SmallModelDrafter
from penstock.messages import Batch, Cancel
from penstock.pipeline.base import Pipeline
from penstock.requests.request import Request
from penstock.tree import Node


class LearnedDrafter(SmallModelDrafter):
    """As a small model, but rows may have to wait for what the target's stages send, and may be computed anew.

    A row is final once it has been computed, or is about to be, with all that can be known of its node.
    """

    def __init__(self, pipeline: Pipeline, chunk: int) -> None:
        super().__init__(pipeline, chunk)
        self._again: set[int] = set()
        self._waiting: dict[int, list[Node]] = {}
        """By request, nodes whose rows may still wait for features."""
        self._final: dict[int, int] = {}
        """By request, how many of its committed nodes, from the first on, have final rows."""
        self._final_in: dict[int, int] = {}
        """By slot, the node whose row there is final: of a block that requests share it stays that for all of them."""

    @property
    def reads_target(self) -> bool:
        return True

    def ask(self, asks: Sequence[DraftRequest]) -> int:
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
        self._final.pop(request.number, None)
        if waiting := self._waiting.pop(request.number, None):
            self._cancel(waiting)

    def _batch(self, entries: Entries, count: int) -> Batch:
        if not self._outstanding:
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
        """Those of the first ``count`` committed nodes that had no final row; the caller has them computed now."""
        if request.number not in self._final:
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
    """EAGLE's, Medusa's and MTP's: each row needs its parent's feature.

    What is committed has gone through the target, so its features are on their way at the latest: such rows wait for
    them. A row below the root does not: where its parent is still in flight, the module's own output takes the
    feature's place. Once such a row has been committed it is computed anew with the target's (EAGLE, section 4.2: the
    accepted tokens' features replace the drafted ones), and what is drafted later sees the better keys.
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
        """The node whose feature the row cannot do without: its parent, if the target's result of it is known."""
        known = 0 < node.position <= request.tree.root.position
        return request.committed[node.position - 1].id if known else 0
