"""Drafts with a small model of the target's family, run as a pipeline of its own on the same stage code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from penstock.config import FieldError
from penstock.drafters.base import Draft, DrafterOptions, DrafterParts, DraftRequest, Weights
from penstock.estimates.estimates import DraftQuality, DraftTiming
from penstock.messages import Batch, Candidates, Span
from penstock.pipeline.base import Pipeline
from penstock.requests.request import BatchBuilder, Request
from penstock.tree import Node

Entries = list[tuple[Request, list[Node]]]


@dataclass(frozen=True, kw_only=True)
class SmallModelOptions(DrafterOptions):
    weights = Weights.DRAFT_MODEL
    priced_as = Weights.DRAFT_MODEL

    model: str | None = None
    """Folder, GGUF file or hub name of the small model, whose tokenizer has to be the target's. The target itself, with
    fewer bits, is one, too."""
    quantization: Literal["auto", "none", "int8", "int4"] = "auto"
    """Whole numbers that its weights are held as; auto: as the engine's own ``quantization`` has it."""

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
        self._asked: dict[int, Node] = {}
        self._outstanding = 0
        self._drafts: list[Draft] = []
        self._spans: list[Span] = []
        """Times of the round's batches in the drafting stage."""

    @property
    def reads_target(self) -> bool:
        return False

    @property
    def free(self) -> bool:
        return False

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
    """The time that a drafter's batches took on its only stage, one after another."""
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
