"""Stages of a real model in one process, driven with hand-made batches; says logits instead of picking tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.checkpoint.checkpoint import open_checkpoint
from penstock.checkpoint.look import even_split
from penstock.messages import NO_SLOT, Batch, CommittedSlots, Opened, Rows, Sampling
from penstock.models.stage_model import StageModel, load_stage
from penstock.stage.driver import StageCore


class _Logits:
    """A StageModel whose picks are the wanted rows' logits."""

    def __init__(self, model: StageModel) -> None:
        self.model = model

    def forward(self, view: Any, hidden: Any) -> Any:
        return self.model.forward(view, hidden)

    def pick(self, view: Any, hidden: Any, wanted: Sequence[int], samplings: Any) -> list[Tensor]:
        return list(self.model.logits(hidden, wanted))


class Staged:
    """A model in ``stages`` stages."""

    def __init__(self, path: Path, stages: int, capacity: int = 96, **options: Any) -> None:
        ranges = even_split(open_checkpoint(str(path)).num_layers, stages)
        self.models = [load_stage(str(path), *bounds, capacity=capacity, **options) for bounds in ranges]
        self.capacity = capacity
        self.begin()

    def begin(self) -> Staged:
        """Begin another session with the same models, which forget all rows of the one before."""
        for model in self.models:
            model.forget()
        self.cores = [
            StageCore(_Logits(model), self.capacity, is_last=model is self.models[-1])  # type: ignore[arg-type]
            for model in self.models
        ]
        self.stream = 0
        return self

    def run(
        self, rows: Rows, wanted: Sequence[int], opened: Sequence[int] = (), committed: Sequence[CommittedSlots] = ()
    ) -> Tensor:
        """Send one batch through every stage; returns the logits [n, V] of the wanted rows."""
        batch = Batch(
            stream=self.stream,
            opened=[Opened(request, Sampling()) for request in opened],
            committed=list(committed),
            rows=rows,
            wanted=list(wanted),
            alive=list(range(len(rows))),
        )
        self.stream += 1
        hidden, picks = None, []
        for core in self.cores:
            batch.alive, hidden, picks, _ = core.process(batch, hidden)
        return torch.stack(picks)

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """Plain greedy decoding of a fresh request 0 in slots 0, 1, 2..; in a session that has just begun."""
        tokens, position, committed, out = list(prompt), 0, [], []
        for _ in range(count):
            slots = range(position, position + len(tokens))
            rows = chain_rows(0, tokens, slots, position, position - 1 if position else NO_SLOT)
            logits = self.run(rows, [len(tokens) - 1], [0] if position == 0 else [], committed)
            committed = [CommittedSlots(0, list(range(position, position + len(tokens))))]
            position += len(tokens)
            tokens = [int(logits[0].argmax())]
            out += tokens
        return out


def chain_rows(
    request: int, tokens: Sequence[int], slots: Sequence[int], position: int = 0, parent: int = NO_SLOT
) -> Rows:
    """Rows of a sequence that starts at ``position`` below the slot ``parent``, each the child of the one before."""
    rows = Rows()
    for i, (token, slot) in enumerate(zip(tokens, slots, strict=True)):
        rows.append(request, 1000 * request + position + i, slot, parent, position + i, token)
        parent = slot
    return rows
