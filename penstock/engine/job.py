"""A prompt on its way through the engine: what was asked, and one request per completion."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from penstock.core import FinishReason, PipelineError, RequestError, RequestOutput, SamplingParams, whole
from penstock.engine.completion import Completion
from penstock.requests.request import Request

if TYPE_CHECKING:
    from penstock.text.tokenizer import Tokenizer

Prompt = str | Mapping[str, Any]
"""Text, or ``{"prompt_token_ids": [...]}``, or ``{"prompt": text}``."""


class Job:
    """One prompt with its ``n`` completions."""

    def __init__(self, prompt: str | None, ids: list[int], params: SamplingParams) -> None:
        self.prompt = prompt
        self.ids = ids
        self.params = params
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


def token_ids_of(given: Any, vocabulary: int) -> list[int]:
    """Token ids of a prompt, as Python's own integers. Raises RequestError naming the first that is none."""
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise RequestError(f"prompt_token_ids is {given!r}; it has to be a list of token ids")
    ids = [whole("a prompt's token id", token) for token in given]
    for token in ids:
        if not 0 <= token < vocabulary:
            raise RequestError(f"prompt_token_ids holds {token}; the model's token ids are 0 to {vocabulary - 1}")
    return ids
