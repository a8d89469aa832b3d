"""Changes to a row's logits before temperature and filters: masks, bias and penalties, all of the row's own path.

The order is vLLM's: the grammar's mask and the allowed tokens, barred tokens, bias, repetition penalty, frequency and
presence penalty. A row's path is the prompt, the committed output, the row's ancestors and the row itself. It does not
depend on what the request has come to since, so that a token stays a function of the text before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from penstock.messages import Sampling
from penstock.stage.grammar import Allowed, GrammarMasks, GrammarRow
from penstock.stage.visibility import BatchView


@dataclass(frozen=True)
class Context:
    """A row's context for the processors.

    ``path`` holds the token ids up to the row, prompt included. ``allowed_V``, bool [V], is what the grammar allows
    next; None without a grammar. ``problem`` says why that is nothing.
    """

    path: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    allowed_V: np.ndarray | None = None
    problem: str = ""


NO_CONTEXT: Final = Context()


def contexts_of(
    view: BatchView, rows: Sequence[int], samplings: Sequence[Sampling], grammars: GrammarMasks | None
) -> list[Context]:
    """The contexts of some of a batch's rows; nothing is looked up for a request whose sampling does not need it."""
    paths = [view.path(row) if needs_path(sampling) else None for row, sampling in zip(rows, samplings, strict=True)]
    asked = {
        at: GrammarRow(int(view.requests[row]), sampling.grammar, path[sampling.prompt_length :])
        for at, (row, sampling, path) in enumerate(zip(rows, samplings, paths, strict=True))
        if sampling.grammar and path is not None
    }
    allowed: dict[int, Allowed] = {}
    if asked:
        assert grammars is not None, "this stage was made without a tokenizer"
        allowed = dict(zip(asked, grammars.allowed(list(asked.values())), strict=True))
    return [context_of(path, asked.get(at), allowed.get(at)) for at, path in enumerate(paths)]


def needs_path(sampling: Sampling) -> bool:
    return bool(sampling.grammar) or is_penalizing(sampling)


def context_of(path: np.ndarray | None, asked: GrammarRow | None, allowed: Allowed | None) -> Context:
    if path is None:
        return NO_CONTEXT
    if asked is None or allowed is None:
        return Context(path)
    problem = f"structured_outputs: after {len(asked.output)} tokens {allowed.problem}" if allowed.problem else ""
    return Context(path, allowed.mask_V, problem)


def is_processing(sampling: Sampling, position: int) -> bool:
    """Whether the processors change the logits of the token at ``position`` at all."""
    masked = bool(sampling.grammar or sampling.allowed_token_ids or sampling.logit_bias)
    return masked or is_barring(sampling, position) or is_penalizing(sampling)


def is_barring(sampling: Sampling, position: int) -> bool:
    return bool(sampling.barred) and position < sampling.barred_before


def is_penalizing(sampling: Sampling) -> bool:
    added = sampling.presence_penalty, sampling.frequency_penalty
    return sampling.repetition_penalty != 1 or added != (0, 0)


def processed(logits_V: np.ndarray, sampling: Sampling, position: int, context: Context) -> np.ndarray:
    """A copy of the logits with all processors applied. Barred tokens are allowed again where no other is left.

    Hence ``min_tokens`` cannot keep a text going that its grammar ends. Tokens that a grammar or ``allowed_token_ids``
    masks stay out in any case: ``refusal`` tells which rows have nothing left.
    """
    scores_V = logits_V.copy()
    allowed_V = allowed_tokens(sampling, context, len(scores_V))
    if allowed_V is not None:
        scores_V[~allowed_V] = -np.inf
    if is_barring(sampling, position):
        scores_V = without_barred(scores_V, sampling.barred)
    for token, bias in sampling.logit_bias:
        scores_V[token] += bias
    if is_penalizing(sampling):
        penalize(scores_V, sampling, context.path)
    return scores_V


def allowed_tokens(sampling: Sampling, context: Context, vocabulary: int) -> np.ndarray | None:
    """The tokens that can be picked at all, bool [V]; None for all of them."""
    if not sampling.allowed_token_ids:
        return context.allowed_V
    allowed_V = np.zeros(vocabulary, dtype=bool)
    allowed_V[list(sampling.allowed_token_ids)] = True
    return allowed_V


def refusal(logits_V: np.ndarray, sampling: Sampling, context: Context) -> str:
    """Why no token can be picked, beginning with the field at fault; empty if one can.

    Either the row is dead, or its grammar can say nothing more, or the model gives no allowed token a chance, as may
    happen with a drafter.
    """
    allowed_V = allowed_tokens(sampling, context, len(logits_V))
    if allowed_V is None or np.isfinite(logits_V[allowed_V]).any():
        return ""
    field = "structured_outputs" if sampling.grammar else "allowed_token_ids"
    return context.problem or f"{field}: the model gives no allowed token a chance"


def without_barred(scores_V: np.ndarray, barred: Sequence[int]) -> np.ndarray:
    """The scores with these token ids at -inf, or as they are if no other is left."""
    left_V = scores_V.copy()
    left_V[[token for token in barred if token < len(scores_V)]] = -np.inf  # a client may send any number
    return left_V if np.isfinite(left_V.max()) else scores_V


def penalize(scores_V: np.ndarray, sampling: Sampling, path: np.ndarray) -> None:
    """Apply the penalties in place.

    The repetition penalty concerns every token on the path (Keskar et al., CTRL, arXiv 1909.05858, section 4.1). The
    frequency penalty, once per occurrence, and the presence penalty, once, concern tokens of the output.
    """
    if (factor := sampling.repetition_penalty) != 1:
        seen = np.bincount(path, minlength=len(scores_V)) > 0
        scores = scores_V[seen]
        scores_V[seen] = np.where(scores > 0, scores / factor, scores * factor)
    # Tokens of the prompt count for the repetition penalty alone, as in vLLM.
    counts_V = np.bincount(path[sampling.prompt_length :], minlength=len(scores_V))
    scores_V -= sampling.frequency_penalty * counts_V
    scores_V -= sampling.presence_penalty * (counts_V > 0)
