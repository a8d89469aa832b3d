"""A generation as /v1/completions tells it, at once or in chunks."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from penstock.core import CompletionOutput, FinishReason
from penstock.engine.completion import CompletionDelta
from penstock.server.openai.completion_protocol import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
)
from penstock.server.openai.generation import Generation
from penstock.server.openai.logprobs import completion_logprobs
from penstock.server.openai.prompts import Prompt
from penstock.server.openai.protocol import FinishWord
from penstock.server.openai.usage import metrics_of, usage_of
from penstock.text.tokenizer import Tokenizer

WORDS: dict[FinishReason, FinishWord] = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.ABORT: "abort",
}


class CompletionWriter:
    def __init__(
        self,
        body: CompletionRequest,
        prompts: Sequence[Prompt],
        generation: Generation,
        model: str,
        tokenizer: Tokenizer,
    ) -> None:
        self._body = body
        self._prompts = prompts
        self._generation = generation
        self._tokenizer = tokenizer
        self._id, self._model, self._created = f"cmpl-{generation.request_id}", model, int(time.time())
        self._n = body.n or 1
        self._offsets = [0] * (self._n * len(prompts))
        """Per choice: characters of the tokens whose log-probabilities have been given."""
        self._spoke: set[int] = set()

    def whole(self) -> Completion:
        reply = self._reply([])
        for number, output in enumerate(self._generation.outputs()):
            reply.choices += [self._choice(choice, number * self._n + choice.index) for choice in output.outputs]
        reply.usage, reply.metrics = usage_of(self._generation), metrics_of(self._generation)
        return reply

    def chunks(self, delta: CompletionDelta) -> Iterator[Completion]:
        choice = self._choice(delta, delta.index)
        told = choice.text or delta.finish_reason or delta.logprobs or self._body.return_token_ids
        if told:
            yield self._reply([choice])

    def last_chunk(self) -> Completion:
        """After all choices have ended: what it took."""
        chunk = self._reply([])
        chunk.usage, chunk.metrics = usage_of(self._generation), metrics_of(self._generation)
        return chunk

    # ---------------------------------------------------------------------------------------------------- inside

    def _reply(self, choices: list[CompletionChoice]) -> Completion:
        reply = Completion(
            id=self._id, object="text_completion", created=self._created, model=self._model, choices=choices
        )
        if self._body.stream_options is not None and self._body.stream_options.include_usage:
            reply.usage = None  # as OpenAI has it in all chunks but the last
        return reply

    def _choice(self, piece: CompletionDelta | CompletionOutput, index: int) -> CompletionChoice:
        prompt = self._prompts[index // self._n]
        first = index not in self._spoke
        self._spoke.add(index)
        choice = CompletionChoice(
            index=index,
            text=prompt.text + piece.text if self._body.echo and first else piece.text,
            logprobs=self._logprobs(piece, index),
            finish_reason=None if piece.finish_reason is None else WORDS[piece.finish_reason],
        )
        if piece.finish_reason is not None:
            choice.stop_reason = piece.stop_reason
        if self._body.return_token_ids:
            choice.token_ids = piece.token_ids
            if first:
                choice.prompt_token_ids = prompt.token_ids
        return choice

    def _logprobs(self, piece: CompletionDelta | CompletionOutput, index: int) -> CompletionLogprobs | None:
        if piece.logprobs is None:
            return None
        found = completion_logprobs(piece.token_ids, piece.logprobs, self._name, self._offsets[index])
        self._offsets[index] += sum(map(len, found.tokens))
        return found

    def _name(self, token: int) -> str:
        return self._tokenizer.decode([token], skip_special_tokens=False)
