"""Runs texts through a model in this process, stage by stage: at most one stage's layers are in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from penstock.stage.visibility import BatchView, RequestView

if TYPE_CHECKING:
    from penstock.engine.resolve import Resolved
    from penstock.models.checkpoint import Checkpoint
    from penstock.models.stage_model import StageModel

CHUNK: Final = 128
"""Rows that go through a stage together."""


@dataclass(frozen=True)
class Text:
    """A prompt and the tokens after it."""

    prompt: Sequence[int]
    picked: Sequence[int]

    @property
    def rows(self) -> list[int]:
        """The tokens that the models read; nothing follows the last one."""
        return [*self.prompt, *self.picked][:-1]


def last_states(
    setup: Resolved, checkpoint: Checkpoint, layers: Sequence[tuple[int, int]], texts: Sequence[Text]
) -> list[list[Any]]:
    """Hidden states after the last layer: per text, chunks of at most CHUNK rows, [n, D] each."""
    capacity = max(len(text.rows) for text in texts)
    states: list[list[Any]] = [[None] * len(chunks(text.rows)) for text in texts]
    for first, last in layers:
        stage = load(setup, checkpoint, first, last, capacity)
        states = [through(stage, text.rows, before) for text, before in zip(texts, states, strict=True)]
        del stage  # before the next one is loaded, so that only one is in memory
    return states


def through(stage: StageModel, tokens: Sequence[int], states: Sequence[Any]) -> list[Any]:
    """Run one text through one stage. Slots still hold another text, but are overwritten before they are read."""
    return [stage.forward(view_of(tokens, rows), hidden) for rows, hidden in zip(chunks(tokens), states, strict=True)]


def chunks(tokens: Sequence[int]) -> list[range]:
    return [range(start, min(start + CHUNK, len(tokens))) for start in range(0, len(tokens), CHUNK)]


def view_of(tokens: Sequence[int], rows: range) -> BatchView:
    """The view of a text in which the token at position i is in slot i and sees those before it."""
    positions, seen = np.asarray(rows), np.arange(rows.stop)
    request = RequestView(0, positions - rows.start, seen, seen, seen[None] <= positions[:, None])
    read = np.asarray(tokens[rows.start : rows.stop])
    return BatchView(np.zeros_like(positions), positions, positions, positions, read, [request], positions - 1)


def head_of(setup: Resolved, checkpoint: Checkpoint) -> StageModel:
    """The last stage without layers: only the norm and the head."""
    return load(setup, checkpoint, checkpoint.num_layers, checkpoint.num_layers, capacity=1)


def load(setup: Resolved, checkpoint: Checkpoint, first: int, last: int, capacity: int) -> StageModel:
    from penstock.models.stage_model import load_stage

    return load_stage(
        str(checkpoint.source),
        first,
        last,
        capacity=capacity,
        dtype=setup.options.dtype,
        device=setup.options.device,
        quantization=setup.quantization if checkpoint is setup.checkpoint else setup.draft_quantization,
        max_model_len=setup.max_model_len,
    )


def logits_after(head: StageModel, states: Sequence[Any], text: Text) -> Iterator[np.ndarray]:
    """Logits, float64 [V], before each token after the prompt, in order."""
    from penstock.stage.sampler import to_float64

    for rows, hidden in zip(chunks(text.rows), states, strict=True):
        wanted = range(max(len(text.prompt) - 1, rows.start) - rows.start, len(rows))
        if wanted:
            yield from to_float64(head.logits(hidden, wanted))
