"""Explains empty answers: the model's first token was an end token."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

from penstock.core import CompletionOutput, FinishReason, RequestOutput
from penstock.engine.completion import CompletionDelta
from penstock.engine.job import Prompt
from penstock.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

WANTS_TEMPLATE: Final = (
    "it is a chat model, which wants its template: use LLM.chat or /v1/chat/completions, or leave --raw out"
)
WANTS_WORDS: Final = "ask in other words or with another seed, or forbid the end with ignore_eos (--ignore-eos)"


def warn_of_empty_answers(
    outputs: Sequence[RequestOutput], prompts: Sequence[Prompt], tokenizer: Tokenizer | None
) -> None:
    """Log one line if completions ended with their first token: how many, and what to do.

    Only prompts that were given as text count as plain text, that is, as written without a chat template.
    """
    if tokenizer is None:
        return
    plain = any(
        isinstance(prompt, str) and any(map(ended_at_once, output.outputs))
        for output, prompt in zip(outputs, prompts, strict=True)
    )
    completions = [completion for output in outputs for completion in output.outputs]
    words = words_of_empty(completions, tokenizer, plain_text=plain)
    if words is not None:
        log.warning(words)


def words_of_empty(
    completions: Sequence[CompletionOutput | CompletionDelta], tokenizer: Tokenizer, *, plain_text: bool
) -> str | None:
    """A message about completions that ended with their first token: how many, and what to do. None if none did."""
    empty = [completion for completion in completions if ended_at_once(completion)]
    if not empty:
        return None
    which = "the answer is empty" if len(completions) == 1 else f"{len(empty)} of {len(completions)} answers are empty"
    return f"{which}: {why_empty(empty[0].token_ids[0], tokenizer, plain_text=plain_text)}"


def ended_at_once(completion: CompletionOutput | CompletionDelta) -> bool:
    """Whether the first token ended the completion, so that it has no text. A delta has to be the first one."""
    return completion.finish_reason is FinishReason.STOP and len(completion.token_ids) == 1 and not completion.text


def why_empty(token: int, tokenizer: Tokenizer, *, plain_text: bool) -> str:
    """The reason and a remedy. ``plain_text``: the prompt was continued as it stands, without a chat template."""
    name = tokenizer.decode([token], skip_special_tokens=False)
    remedy = WANTS_TEMPLATE if plain_text and tokenizer.is_of_chat else WANTS_WORDS
    return f"the model's first token was an end token ({name!r}); {remedy}"
