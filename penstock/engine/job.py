"""A request as its caller sees it: sampling parameters, completions, and text as it comes."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from penstock.core import (
    CompletionOutput,
    FinishReason,
    PipelineError,
    RequestError,
    RequestOutput,
    SamplingParams,
    whole,
)
from penstock.engine.completion import Completion, CompletionDelta
from penstock.messages import Sampling
from penstock.requests.request import Request
from penstock.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from penstock.checkpoint.checkpoint import Checkpoint


# ------------------------------------------------------------------------------------------------------------------ job
# A prompt on its way through the engine: what was asked, and one request per completion.

Prompt = str | Mapping[str, Any]
"""Text, or ``{"prompt_token_ids": [...]}``, or ``{"prompt": text}``."""


class Job:
    """One prompt with its ``n`` completions."""

    def __init__(self, prompt: str | None, ids: list[int], params: SamplingParams) -> None:
        self.prompt = prompt
        self.ids = ids
        self.params = params
        self.seed = 0
        """The seed of its noise, also where one was drawn: whoever goes on with an answer needs it."""
        self.requests: list[Request] = []
        self.completions: list[Completion] = []
        self.pinned = 0
        """How many of the prompt's first tokens stay in the prefix cache after the job has ended."""

    @property
    def ended(self) -> bool:
        return all(request.finished is not None for request in self.requests)

    def raise_if_failed(self, ended: str | None) -> None:
        """Raise RequestError where a completion could not go on, PipelineError where the engine ended before it did.

        ``ended`` says why the engine did.
        """
        for request in self.requests:
            if request.error:
                raise RequestError(self._named(request.error))
            if request.finished is FinishReason.ERROR:
                raise PipelineError(f"the request was lost ({ended})")

    def _named(self, error: str) -> str:
        """The error with the field's whole name: a stage does not know which field its grammar was made of."""
        structure = self.params.structured_outputs
        if structure is None:
            return error
        return error.replace("structured_outputs:", f"structured_outputs.{structure.kind}:", 1)

    def output(self) -> RequestOutput:
        outputs = [completion.output for completion in self.completions]
        cached = max(request.cached for request in self.requests)
        return RequestOutput(str(self.requests[0].number), self.prompt, self.ids, outputs, True, cached)


def prompts_of(given: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many as a list. Raises RequestError for anything else."""
    if not isinstance(given, Iterable):
        raise RequestError(f"prompts is {given!r}; it has to be a prompt or a list of prompts")
    return [given] if isinstance(given, str | Mapping) else list(given)


@contextmanager
def naming(place: int, count: int) -> Iterator[None]:
    """Have a RequestError of the block name the prompt by its place among ``count``, unless it is the only one."""
    try:
        yield
    except RequestError as error:
        if count == 1:
            raise
        raise type(error)(f"prompts[{place}]: {error}") from error


def check_known(tokenizer: Tokenizer, ids: Sequence[int], vocabulary: int) -> None:
    """Raise RequestError for a text with a token that was added to the tokenizer and has no row in the embedding."""
    for token in ids:
        if token >= vocabulary:
            raise RequestError(
                f"the prompt holds {tokenizer.decode([token], skip_special_tokens=False)!r}, token {token} of the "
                f"tokenizer; the model's token ids are 0 to {vocabulary - 1}: take it out of the text"
            )


def token_ids_of(
    given: Any, vocabulary: int, name: str = "prompt_token_ids", one: str = "a prompt's token id"
) -> list[int]:
    """Token ids as Python's own integers. Raises RequestError naming the first that is none.

    ``name`` is the field's, and ``one`` stands for a single id, in the error.
    """
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise RequestError(f"{name} is {given!r}; it has to be a list of token ids")
    ids = [whole(one, token) for token in given]
    for token in ids:
        if not 0 <= token < vocabulary:
            raise RequestError(f"{name} holds {token}; the model's token ids are 0 to {vocabulary - 1}")
    return ids


# ------------------------------------------------------------------------------------------------------------- sampling
# Turns a user's sampling parameters into what the stages need, and refuses those that the model cannot serve.


def ends_of(params: SamplingParams, checkpoint: Checkpoint) -> frozenset[int]:
    """Token ids at which a request ends."""
    own = () if params.ignore_eos else checkpoint.eos_token_ids
    return frozenset(params.stop_token_ids) | frozenset(own)


def sampling_of(params: SamplingParams, seed: int, sample: int, ends: frozenset[int], prompt_length: int) -> Sampling:
    return Sampling(
        seed=seed,
        sample=sample,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=max(params.top_k, 0),
        min_p=params.min_p,
        logprobs=-1 if params.logprobs is None else params.logprobs,
        barred=tuple(sorted(ends)) if params.min_tokens else (),
        barred_before=prompt_length + params.min_tokens if params.min_tokens else 0,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        logit_bias=tuple(sorted((params.logit_bias or {}).items())),
        allowed_token_ids=tuple(params.allowed_token_ids or ()),
        grammar=grammar_text(params),
        prompt_length=prompt_length,
    )


def grammar_text(params: SamplingParams) -> str:
    if params.structured_outputs is None:
        return ""
    from penstock.text.grammar import grammar_of

    return grammar_of(params.structured_outputs)


def check_sampling(params: SamplingParams, checkpoint: Checkpoint, tokenizer: Tokenizer | None) -> None:
    """Raise RequestError, naming the field, for parameters that this model cannot serve.

    A new grammar is compiled by a worker, within limits on time and memory.
    """
    for name in ("logit_bias", "allowed_token_ids"):
        beyond = [token for token in getattr(params, name) or () if token >= checkpoint.vocab_size]
        if beyond:
            last = checkpoint.vocab_size - 1
            raise RequestError(f"{name} holds {beyond[0]}; the model's token ids are 0 to {last}")
    if params.structured_outputs is None:
        return
    if tokenizer is None:
        raise RequestError("structured_outputs needs a tokenizer; leave out skip_tokenizer_init=True")
    if not checkpoint.eos_token_ids:
        raise RequestError("structured_outputs: the checkpoint names no EOS token, so no output could end")
    from penstock.text.grammar import check_grammar

    check_grammar(params.structured_outputs, tokenizer, checkpoint.vocab_size, checkpoint.eos_token_ids)


# ---------------------------------------------------------------------------------------------------------------- empty
# Explains empty answers: the model's first token was an end token.

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
