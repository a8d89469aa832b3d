"""Quality without a judge: the target's own likelihood of each answer to the plain question."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from penstock.bench.quality.answers import Answered
from penstock.bench.reading import Text, head_of, last_states, logits_after

if TYPE_CHECKING:
    from penstock.engine.resolve import Resolved


def log_likelihoods(
    setup: Resolved, encode: Callable[[str], Sequence[int]], answers: Sequence[Answered]
) -> list[tuple[float | None, float | None]]:
    """Mean log-likelihood per token, in nats, of each plain answer and of each one in points; None for an empty one.

    Both are read as texts after the plain prompt, in this process and after the engine has ended.
    """
    pairs = [(answer.plain, answer.points) for answer in answers]
    texts = [
        [Text(answer.prompt, encode(text)) if text else None for text in pair]
        for answer, pair in zip(answers, pairs, strict=True)
    ]
    found = iter(means(setup, [text for pair in texts for text in pair if text is not None and text.picked]))
    scored = [[next(found) if text is not None and text.picked else None for text in pair] for pair in texts]
    return [(plain, points) for plain, points in scored]


def means(setup: Resolved, texts: Sequence[Text]) -> list[float]:
    if not texts:
        return []
    states = last_states(setup, setup.checkpoint, setup.layers, texts)
    head = head_of(setup, setup.checkpoint)
    return [
        float(
            np.mean(
                [
                    logits_V[token] - np.logaddexp.reduce(logits_V)
                    for logits_V, token in zip(logits_after(head, left, text), text.picked, strict=True)
                ]
            )
        )
        for text, left in zip(texts, states, strict=True)
    ]
