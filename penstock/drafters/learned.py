"""Drafters that run as pipelines of their own: a small model, and modules that read the target's features."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Literal, cast

from penstock.config import FieldError, check_positive
from penstock.drafters.base import Draft, DrafterOptions, DrafterParts, DraftRequest, Weights
from penstock.estimates.estimates import DraftQuality, DraftTiming
from penstock.messages import CONTEXT, KEPT, PATH, Batch, Cancel, Candidates, Span
from penstock.pipeline.base import Pipeline
from penstock.requests.request import BatchBuilder, Request
from penstock.tree import Node

if TYPE_CHECKING:
    from penstock.models.speculators.block import BlockShape
    from penstock.models.speculators.block_format import BlockCheckpoint


# ---------------------------------------------------------------------------------------------------------- small model
# Drafts with a small model of the target's family, run as a pipeline of its own on the same stage code.

Entries = list[tuple[Request, list[Node]]]
"""The rows of a drafting batch, request by request, parents first."""


@dataclass(frozen=True, kw_only=True)
class SmallModelOptions(DrafterOptions):
    """Options of ``draft_model``: a small model with the target's tokenizer. Raises FieldError without ``model``."""

    weights = Weights.DRAFT_MODEL
    priced_as = Weights.DRAFT_MODEL

    model: str | None = None
    """Folder, GGUF file or hub id of the small model, whose tokenizer has to be the target's; None only where the
    target is ``demo``. The target itself, with fewer bits, is one, too."""
    quantization: Literal["auto", "none", "int8", "int4"] = "auto"
    """Format of its weights: int8 or int4, which are whole numbers, or none, which is floats; auto: as the engine's
    ``quantization`` says."""

    def __post_init__(self) -> None:
        if not self.model:
            raise FieldError("model", "is missing: method 'draft_model' needs the small model's folder or name")

    def start(self, parts: DrafterParts) -> SmallModelDrafter:
        return SmallModelDrafter(parts.start_weights(), parts.chunk)


class SmallModelDrafter:
    """Asks a drafting pipeline for noise-ranked candidates. It has the target's KV slots: one table serves both.

    Rows that the small model has not seen yet (the prompt, tokens that nobody drafted) enter before the nodes that are
    asked about, at most ``chunk`` rows per batch.
    """

    def __init__(self, pipeline: Pipeline, chunk: int) -> None:
        self.pipeline = pipeline
        self._builder = BatchBuilder()
        self._chunk = chunk
        self._queue: list[tuple[Entries, int]] = []
        """The round's batches that have yet to be sent, each with the number of candidates wanted."""
        self._asked: dict[int, Node] = {}
        """Nodes that have not been answered, by id."""
        self._outstanding = 0
        """Number of batches in flight."""
        self._drafts: list[Draft] = []
        """Answers that have not been polled yet."""
        self._spans: list[Span] = []
        """Times of the round's batches in the drafting stage."""

    @property
    def reads_target(self) -> bool:
        return False

    @property
    def free(self) -> bool:
        return False

    @property
    def rows_per_node(self) -> int:
        return 1

    @property
    def busy(self) -> bool:
        return bool(self._queue or self._outstanding or self._drafts)

    @property
    def timing(self) -> DraftTiming:
        return timing_of(self._spans)

    def ask(self, asks: Sequence[DraftRequest]) -> int:
        total = 0
        self._spans = []
        for ask in asks:
            rows = self._rows(ask)
            lacking = {node.id for node in rows}
            for node in ask.nodes:
                if node.id in lacking:
                    self._asked[node.id] = node
                else:  # computed before as another node's ancestor: its answer was not kept
                    self._drafts.append(Draft(node, []))
            for first in range(0, len(rows), self._chunk):
                self._queue.append(([(ask.request, rows[first : first + self._chunk])], ask.count))
            total += len(rows)
        # Chunks of one request stay apart and in order; those of several share batches.
        self._queue = merge(self._queue, self._chunk)
        self._submit()
        return total

    def poll(self) -> list[Draft]:
        for result in self.pipeline.poll():
            self._outstanding -= 1
            self._spans += result.spans
            self._take(result.candidates)
        self._submit()
        if not self._queue and not self._outstanding:
            self._drafts += [Draft(node, None) for node in self._asked.values() if node.alive and not node.candidates]
            self._asked.clear()
        drafts, self._drafts = self._drafts, []
        return drafts

    @property
    def due(self) -> float | None:
        return 0.0 if self._drafts else self.pipeline.due

    def calibrate_by(self, quality: DraftQuality) -> None:
        """Does nothing: the engine calibrates this drafter's candidates."""

    def prepare_grammar(self, request: Request) -> None:
        self.pipeline.prepare_grammar(request.number, request.sampling.grammar)

    def has_grammar(self, request: Request) -> bool:
        return self.pipeline.has_grammar(request.number)

    def forget(self, request: Request) -> None:
        left = [([e for e in entries if e[0] is not request], count) for entries, count in self._queue]
        self._queue = [(entries, count) for entries, count in left if entries]
        self._builder.close(request.number)
        if request.sampling.grammar:
            self.pipeline.forget_grammar(request.number)

    def _rows(self, ask: DraftRequest) -> list[Node]:
        """The nodes that have to be computed so that the drafter can answer, parents first."""
        return self._builder.missing(ask.request, ask.nodes)

    def _batch(self, entries: Entries, count: int) -> Batch:
        return self._builder.batch(entries, wanted=set(self._asked), candidates=count)

    def close(self) -> None:
        self.pipeline.close()

    def _submit(self) -> None:
        while self._queue and self.pipeline.ready:
            entries, count = self._queue.pop(0)
            # Nodes may have died since the ask; tokens committed meanwhile would hide their ancestors.
            live = [(request, [node for node in nodes if node.alive]) for request, nodes in entries]
            batch = self._batch(live, count)
            self._outstanding += 1
            self.pipeline.submit(batch)

    def _take(self, answers: Sequence[Candidates]) -> None:
        """Take in a batch's answers."""
        self._drafts += [
            Draft(self._asked.pop(answer.node), list(zip(answer.tokens, answer.scores, strict=True)))
            for answer in answers
        ]


def timing_of(spans: Sequence[Span]) -> DraftTiming:
    """The seconds that a drafter's batches took on its only stage, one after another."""
    features = at = computing = free = 0.0
    for span in spans:
        if span.features is not None:
            # Waiting for the stage itself is no waiting for features.
            features += span.start - max(span.received, free)
            at = max(at, span.features)
        computing += span.end - span.start
        free = span.end
    return DraftTiming(features=features, features_at=at, computing=computing)


def merge(queue: list[tuple[Entries, int]], limit: int) -> list[tuple[Entries, int]]:
    """Join neighbouring entries of different requests as long as a batch stays within ``limit`` rows."""
    merged: list[tuple[Entries, int]] = []
    for entries, count in queue:
        if merged:
            before, before_count = merged[-1]
            rows = sum(len(nodes) for _, nodes in [*before, *entries])
            # A batch holds one entry per request, and asks for one number of candidates.
            separate = {r.number for r, _ in before}.isdisjoint(r.number for r, _ in entries)
            if rows <= limit and separate and count == before_count:
                merged[-1] = ([*before, *entries], count)
                continue
        merged.append((list(entries), count))
    return merged


# -------------------------------------------------------------------------------------------------------------- learned
# Learned drafters: modules that read the target's features, run as a pipeline of one stage.


class LearnedDrafter(SmallModelDrafter):
    """A small-model drafter whose rows may wait for features of the target's stages and may be computed again.

    A row is final once it is computed, or about to be, with everything that can be known about its node.
    """

    def __init__(self, pipeline: Pipeline, chunk: int) -> None:
        super().__init__(pipeline, chunk)
        self._again: set[int] = set()
        """Ids of the nodes whose rows enter once more in this round."""
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
        """The nodes among the first ``count`` committed ones that have no final row yet.

        They count as final from now on: the caller has to have them computed."""
        if request.number not in self._final:
            # A shared prefix may have final rows already, computed for another request in the same slots.
            shared = itertools.takewhile(lambda node: self._final_in.get(node.slot) == node.id, request.committed)
            self._final[request.number] = sum(1 for _ in shared)
        nodes = request.committed[self._final[request.number] : count]
        self._final[request.number] = count
        # By slot and node, since slots are reused: another request that shares this block finds its rows by the same
        # ids, and a later row in the slot has another one.
        self._final_in.update((node.slot, node.id) for node in nodes)
        return nodes


@dataclass(frozen=True, kw_only=True)
class LearnedOptions(DrafterOptions):
    """Options of every learned drafter, whose module was trained on the target's hidden states and reads them."""

    weights = Weights.SPECULATOR
    priced_as = Weights.SPECULATOR

    model: str | None = None
    """Folder or hub id of the learned drafter; None only for those that are shipped for the target ``demo``."""
    quantization: Literal["auto", "none", "int8", "int4"] = "auto"
    """Format of its weights: int8 or int4, which are whole numbers and for CPUs alone, or none, which is floats; auto:
    int8 where it computes in float32 on a real CPU. The text does not depend on it, only how often drafts are right."""


@dataclass(frozen=True, kw_only=True)
class FollowingOptions(LearnedOptions):
    """Options of ``eagle``, ``eagle3`` and ``medusa``.

    Sources: Li et al., EAGLE, section 3.1, and EAGLE-3, section 3; Cai et al., Medusa, section 2.1.1.
    """

    def start(self, parts: DrafterParts) -> FollowingDrafter:
        return FollowingDrafter(parts.start_weights(), parts.chunk)


@dataclass(frozen=True, kw_only=True)
class MtpOptions(FollowingOptions):
    """Options of ``mtp``, the target's own head for multi-token prediction (DeepSeek-V3, section 2.2)."""

    of_target = True

    model: str | None = None
    """Folder of an MTP head that was trained separately (``penstock train mtp``); None is the target's own."""


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
        # No row that has entered stands below one that has not, so those computed again can come first.
        return [*again, *self._builder.missing(request, ask.nodes)]

    def _batch(self, entries: Entries, count: int) -> Batch:
        batch = super()._batch(entries, count)
        feature_nodes = {node.id: self._feature_node(request, node) for request, nodes in entries for node in nodes}
        batch.feature_nodes = [feature_nodes[node] for node in batch.rows.nodes]
        return batch

    def _feature_node(self, request: Request, node: Node) -> int:
        """The node whose feature the row has to wait for: its parent, if the target's result for it is
        known, else 0."""
        # Committed up to the root, the parent stands one position before: index p - 1 for the row at position p.
        known = 0 < node.position <= request.tree.root.position
        return request.committed[node.position - 1].id if known else 0


# ---------------------------------------------------------------------------------------------------------------- block
# The drafter of block modules, which draft several levels below a node in one pass.


@dataclass(frozen=True, kw_only=True)
class BlockOptions(LearnedOptions):
    """Options of ``dflash`` (DFlash 2 included), ``dspark``, ``headrace``, ``jetspec`` and ``peagle``, which draft a
    block of levels in one pass.

    Sources: DSpark (arXiv 2607.05147), JetSpec (arXiv 2606.18394), P-EAGLE (arXiv 2602.01469); Headrace is Penstock's
    own (docs/background/drafting.md). Raises FieldError for a negative ``ahead``.
    """

    model: str | None = None
    """Folder or hub id of the block drafter, or the GGUF file of a DFlash, DFlash 2 or DSpark; None only for those that
    are shipped for the target ``demo``."""
    ahead: int | None = None
    """Most levels below a node's candidates that are kept from the same pass, drafted without knowing which candidate
    is right; 0: a pass for every node. None: as many as the module's block has. Strategies that keep a pipeline full
    use only those for which the next pass would be too late."""

    def __post_init__(self) -> None:
        check_positive(self, "ahead", or_zero=True)

    def start(self, parts: DrafterParts) -> BlockDrafter:
        shape = cast("BlockCheckpoint", parts.speculator).shape
        return BlockDrafter(parts.start_weights(), parts.chunk, shape, self.ahead)


Level = Sequence[tuple[int, float]]
"""The candidates, as (token, log chance), for any node at one distance below a node that was asked about."""


class Computed:
    """The nodes for which blocks have been computed, and how many levels below each its block reaches."""

    def __init__(self) -> None:
        self._by_request: dict[int, dict[int, tuple[Node, int, list[Level]]]] = {}
        """(node, levels, the levels themselves where they are known without their nodes), by request and node."""

    def above(self, request: Request, node: Node, most: float) -> tuple[list[Level], int]:
        """The levels that were drafted below the nearest such node above, and how far above that is, ``most`` at most.

        The distance is 0 where a pass has to answer: the levels do not reach the node, or the node has entered or is
        asked about again, when a block that shows it knows more. The levels are empty also where one row has to answer,
        because the module has a Markov head or a selector.
        """
        drafted = self._by_request.get(request.number)
        above, distance = node.parent, 1
        if node.entered or node.candidates is not None or not drafted:
            return [], 0
        while above is not None and above.id not in drafted:
            above, distance = above.parent, distance + 1
        _, reach, levels = drafted[above.id] if above is not None else (node, 0, [])
        return (levels, distance) if distance <= min(reach, most) else ([], 0)

    def keep(self, request: int, node: Node, reach: int, levels: list[Level]) -> None:
        """Store the levels below a node, of which there are ``reach``, and drop those of nodes that have left the
        tree."""
        known = self._by_request.get(request, {})
        kept = {i: entry for i, entry in known.items() if entry[0].open}
        self._by_request[request] = kept | {node.id: (node, reach, levels)}

    def forget(self, request: Request) -> None:
        self._by_request.pop(request.number, None)


class BlockDrafter(LearnedDrafter):
    """Asks a block module, and answers for nodes further below with the levels that one pass drafted.

    Committed tokens before the root give context by their own states, which have left the last stage with the result
    that made the root, so that no pass waits for more. A node that has entered, or is asked about again, gets a pass
    of its own, in which the tokens from the root down to it are shown. One that has not entered is answered from the
    levels that a pass for a node above it has drafted, if they reach it and ``DraftRequest.levels`` does, too: that
    costs no message, or with a Markov head or a selector one row, since the node's own token has its say.
    """

    def __init__(self, pipeline: Pipeline, chunk: int, shape: BlockShape, ahead: int | None = None) -> None:
        super().__init__(pipeline, chunk)
        self._shape: Final = shape
        self._ahead = shape.ahead if ahead is None else min(ahead, shape.ahead)
        self._levels: dict[int, int] = {}
        """The level of each row that has yet to be sent, by node."""
        self._computed = Computed()
        self._blocks: dict[int, tuple[int, int]] = {}
        """The request of each node that a block is being computed for, and how many levels below it that reaches."""

    @property
    def rows_per_node(self) -> int:
        return self._shape.size

    def ask(self, asks: Sequence[DraftRequest]) -> int:
        """Begin a round. Returns its rows, those of the blocks included."""
        self._levels.clear()
        self._blocks.clear()
        left = []
        for ask in asks:
            nodes = []
            for node in ask.nodes:
                levels, distance = self._computed.above(ask.request, node, ask.levels)
                if levels:
                    self._drafts.append(Draft(node, levels[distance - 1][: ask.count]))
                    continue
                nodes.append(node)
                # With a Markov head or a selector the block above has all but the node's own token, which one row adds.
                if distance:
                    self._levels[node.id] = KEPT
                else:
                    shown = node.position - ask.request.tree.root.position + 1
                    self._blocks[node.id] = ask.request.number, min(self._ahead, self._shape.reach(shown))
            if nodes:
                left.append(replace(ask, nodes=nodes))
        return super().ask(left) + len(self._blocks) * (self._shape.size - 1)

    def forget(self, request: Request) -> None:
        super().forget(request)
        self._computed.forget(request)
        self._blocks = {node: entry for node, entry in self._blocks.items() if entry[0] != request.number}

    def _rows(self, ask: DraftRequest) -> list[Node]:
        request, root = ask.request, ask.request.tree.root
        context = self._finalize(request, len(request.committed) - 1)
        again = [node for node in ask.nodes if self._builder.has(request, node)]
        # What is committed has been finalized, for this request or for another one that shares its block.
        path = [node for node in self._builder.missing(request, ask.nodes) if node.position >= root.position]
        self._again.update(node.id for node in [*context, *again] if self._builder.has(request, node))
        self._levels.update((node.id, CONTEXT) for node in context)
        return [*context, *path, *again]

    def _batch(self, entries: Entries, count: int) -> Batch:
        batch = super()._batch(entries, count)
        batch.ahead = 0 if self._shape.chained else self._ahead
        batch.feature_levels = [self._levels.pop(node, PATH) for node in batch.rows.nodes]
        batch.feature_nodes = [
            node if level == CONTEXT else 0 for node, level in zip(batch.rows.nodes, batch.feature_levels, strict=True)
        ]
        return batch

    def _take(self, answers: Sequence[Candidates]) -> None:
        below: dict[int, list[Level]] = {}
        for answer in answers:
            if answer.level > 0:
                below.setdefault(answer.node, []).append(list(zip(answer.tokens, answer.scores, strict=True)))
        own = [answer for answer in answers if answer.level == 0]
        for answer in own:
            self._keep(answer.node, below.get(answer.node, []))
        super()._take(own)

    def _keep(self, node: int, levels: list[Level]) -> None:
        """Store the levels that a block drafts below the node that it was computed for."""
        if node in self._blocks:
            request, reach = self._blocks[node]
            self._computed.keep(request, self._asked[node], reach if self._shape.chained else len(levels), levels)
