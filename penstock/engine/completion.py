"""A request as its caller sees it: sampling parameters, completions, and text as it comes."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Final

from penstock.core import (
    CompletionOutput,
    FinishReason,
    Logprob,
    PipelineError,
    RequestError,
    RequestOutput,
    SamplingParams,
    whole,
)
from penstock.messages import SampledToken, Sampling
from penstock.requests.request import Request
from penstock.text.detokenizer import IncrementalDetokenizer
from penstock.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from penstock.checkpoint.checkpoint import Checkpoint


# ----------------------------------------------------------------------------------------------------------- completion
# One completion as its reader sees it: tokens, text, and what is new since the reader last looked.

FEW_TOKENS: Final = 8
"""Tokens up to which a completion's speed says too little to be compared with plain decoding's. One late batch would
decide it."""


@dataclass
class CompletionDelta:
    """New output of one completion since its last delta; the fields are named as in ``CompletionOutput``."""

    index: int
    """The completion's index within the request, from 0 on."""
    token_ids: list[int]
    """New tokens."""
    text: str
    """New text, in whole characters. It may lag behind ``token_ids``."""
    logprobs: list[dict[int, Logprob]] | None = None
    """Log probabilities of the new tokens, one entry each; None where they were not asked for."""
    finish_reason: FinishReason | None = None
    """Set once the completion has ended."""
    stop_reason: int | str | None = None
    """The stop token or string that ended it."""
    points: tuple[tuple[int, str], ...] = ()
    """In an answer in points: pairs of a point's number and its new text, also of points whose turn has not come."""

    def add_to(self, output: CompletionOutput) -> None:
        """Append this delta to ``output``, which holds everything before it."""
        output.token_ids += self.token_ids
        output.text += self.text
        if self.logprobs is not None:
            output.logprobs = (output.logprobs or []) + self.logprobs
        output.finish_reason, output.stop_reason = self.finish_reason, self.stop_reason

    def followed_by(self, later: CompletionDelta) -> CompletionDelta:
        """This delta and the ``later`` one merged into one."""
        return CompletionDelta(
            self.index,
            self.token_ids + later.token_ids,
            self.text + later.text,
            None if self.logprobs is None else self.logprobs + (later.logprobs or []),
            later.finish_reason,
            later.stop_reason,
            self.points + later.points,
        )


class Completion:
    """Collects one completion's tokens and text; tells the engine when a stop string has come."""

    def __init__(self, index: int, params: SamplingParams, text: IncrementalDetokenizer | None, started: float) -> None:
        self.output = CompletionOutput(index=index)
        self.output.logprobs = [] if params.logprobs is not None else None
        self._params = params
        self._text = text
        self._undecoded: list[int] = []
        self._started = started
        self._taken_tokens = self._taken_text = 0
        self._taken_end = False

    def resume(self, token_ids: list[int]) -> int | None:
        """Begin with the tokens of an earlier run.

        Returns the index of the token that completes a stop string, or None if no token does.
        """
        self.output.token_ids += token_ids
        self.output.resumed = len(token_ids)
        if self._text is None:
            return None
        pieces, stopped = [], None
        for place, token in enumerate(token_ids):
            pieces.append(self._text.append(token))
            if self._text.stopped is not None:
                stopped, self.output.stop_reason = place, self._text.stopped
                break
        self.output.text = "".join(pieces)
        return stopped

    def mark_taken(self) -> None:
        """Count the tokens and the text so far as taken; an end is still to be told."""
        self._taken_tokens, self._taken_text = len(self.output.token_ids), len(self.output.text)

    def append(self, pick: SampledToken, at: float) -> FinishReason | None:
        if self.output.first_token_seconds is None:
            self.output.first_token_seconds = at - self._started
        self.output.token_ids.append(pick.token)
        if self.output.logprobs is not None:
            self.output.logprobs.append(logprobs_of(pick))
        self._undecoded.append(pick.token)
        # Stages wait for the engine now, so text is decoded later, unless a stop string may end the request here.
        if self._text is None or not self._params.stop:
            return None
        self.detokenize_pending()
        if self._text.stopped is None:
            return None
        self.output.stop_reason = self._text.stopped
        return FinishReason.STOP

    def detokenize_pending(self) -> None:
        """Decode the tokens that have come, for a reader or because their text may hold a stop string."""
        tokens, self._undecoded = self._undecoded, []
        if self._text is not None:
            self.output.text += "".join([self._text.append(token) for token in tokens])

    def finish(self, reason: FinishReason, at: float, plain_s: float = 0.0) -> None:
        self.detokenize_pending()
        self.output.finish_reason = reason
        self.output.seconds = at - self._started
        speed = self.output.tokens_per_second
        if plain_s and speed is not None and len(self.output.token_ids) - self.output.resumed > FEW_TOKENS:
            self.output.speed_up = speed * plain_s
        ids = self.output.token_ids
        if reason is FinishReason.STOP and ids and ids[-1] in self._params.stop_token_ids:
            self.output.stop_reason = ids[-1]
        if self._text is not None:
            self.output.text += self._text.finish()
            self._note_late_stop()

    def _note_late_stop(self) -> None:
        """Report a stop string that only the end at ``max_tokens`` made certain.

        Until then its last bytes could have become another character.
        """
        output, stopped = self.output, None if self._text is None else self._text.stopped
        if output.finish_reason is FinishReason.LENGTH and stopped is not None:
            output.finish_reason, output.stop_reason = FinishReason.STOP, stopped

    def take(self) -> CompletionDelta | None:
        """The output since the last call; None if there is nothing new.

        Its text is exactly what its tokens determine: a caller that knows the token ids also knows which text has been
        returned, so that a resumed request repeats none of it.
        """
        self.detokenize_pending()
        output, first = self.output, self._taken_tokens
        ended = output.finish_reason is not None and not self._taken_end
        if len(output.token_ids) == first and len(output.text) == self._taken_text and not ended:
            return None
        # Tokens that the request was resumed with have no log-probabilities: that list begins behind them.
        delta = CompletionDelta(
            output.index,
            output.token_ids[first:],
            output.text[self._taken_text :],
            None if output.logprobs is None else output.logprobs[first - output.resumed :],
            output.finish_reason,
            output.stop_reason,
        )
        self._taken_tokens, self._taken_text = len(output.token_ids), len(output.text)
        self._taken_end = ended
        return delta


def logprobs_of(pick: SampledToken) -> dict[int, Logprob]:
    """The k most probable tokens and the chosen one, most probable first, as vLLM gives them."""
    top = {token: Logprob(logprob, rank + 1) for rank, (token, logprob) in enumerate(pick.top)}
    top.setdefault(pick.token, Logprob(pick.logprob, pick.rank))
    return top


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
        """Number of the prompt's first tokens that stay in the prefix cache after the job has ended."""

    @property
    def ended(self) -> bool:
        """Whether all completions have ended."""
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
        """The job's output, all of whose completions have ended."""
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
    """The parameters of one completion as stages and drafter need them.

    ``sample`` is the completion's index, ``ends`` are the tokens at which it ends.
    """
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
    """The grammar of the structure that the output has to have, in llguidance's format; "" for none."""
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


# --------------------------------------------------------------------------------------------------------------- resume
# Requests that begin with tokens of an earlier run: checks of what came, and where the answer stands after it.
#
# Noise is keyed by seed and position, and penalties, grammars and stops are functions of the tokens alone. An answer
# that was cut off therefore goes on with the tokens that it would have had, here or on another engine with the same
# model.


def resumed_ids(given: Any, params: SamplingParams, vocabulary: int) -> list[list[int]]:
    """The tokens that each of the ``n`` completions begins with, as Python's own integers.

    Raises RequestError, naming the completion, for tokens that the request cannot have brought.
    """
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise RequestError(f"resumed is {given!r}; it has to be a list of token ids for each completion")
    lists = list(given)
    if len(lists) != params.n:
        raise RequestError(f"resumed has {len(lists)} lists of token ids for n = {params.n} completions")
    found = [
        token_ids_of(one, vocabulary, f"resumed[{index}]", f"resumed[{index}]: a token id")
        for index, one in enumerate(lists)
    ]
    for index, ids in enumerate(found):
        _check_possible(f"resumed[{index}]", ids, params)
    if any(found) and params.temperature > 0 and params.seed is None:
        raise RequestError(
            "seed is not given; with resumed tokens of a sampled answer it has to be that of its beginning"
        )
    return found


def _check_possible(name: str, ids: list[int], params: SamplingParams) -> None:
    if len(ids) > params.max_tokens:
        raise RequestError(f"{name} holds {len(ids)} tokens; max_tokens is {params.max_tokens}")
    if params.allowed_token_ids is not None:
        allowed = set(params.allowed_token_ids)
        other = next((token for token in ids if token not in allowed), None)
        if other is not None:
            raise RequestError(f"{name} holds {other}, which is not among allowed_token_ids")


def check_structure(
    resumed: Sequence[Sequence[int]], params: SamplingParams, tokenizer: Tokenizer, vocabulary: int, ends: Sequence[int]
) -> None:
    """Raise RequestError unless the structure of the output allows these tokens. A worker reads them, within limits.

    ``ends`` are the checkpoint's EOS tokens, behind which a structured output has nothing but them.
    """
    from penstock.text.grammar import check_output

    assert params.structured_outputs is not None
    for index, ids in enumerate(resumed):
        text = list(takewhile(lambda token: token not in ends, ids))
        after = ids[len(text) :]
        if any(token not in ends for token in after):
            problem = "it goes on after its end"
        elif ids:
            problem = check_output(params.structured_outputs, tokenizer, vocabulary, ends, text, ended=bool(after))
        else:
            problem = ""
        if problem:
            raise RequestError(f"resumed[{index}] is not what structured_outputs allows: {problem}")


def resume(request: Request, completion: Completion, at: float) -> None:
    """Have ``completion`` begin with the tokens that ``request`` was made with; its reader has them and their text.

    A completion that ended with them is over, and its end is told again without tokens or text. ``at`` is the moment of
    submission in seconds. Raises RequestError where the tokens go on after an end.
    """
    ids, name = request.tokens[len(request.prompt) :], f"resumed[{completion.output.index}]"
    if not ids:
        return
    early = next((place for place, token in enumerate(ids[:-1]) if token in request.stop_ids), None)
    if early is not None:
        raise RequestError(f"{name} goes on after token {ids[early]} at place {early}, which ends the output")
    stopped = completion.resume(ids)
    if stopped is not None and stopped < len(ids) - 1:
        raise RequestError(f"{name} goes on after a stop string, which ends the output at place {stopped}")
    reason = FinishReason.STOP if stopped is not None else request.end_of(ids[-1])
    if reason is not None:
        request.finished = reason
        completion.finish(reason, at)
    completion.mark_taken()
