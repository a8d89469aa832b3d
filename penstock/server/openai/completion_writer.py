"""The writer of /v1/completions: choices as one reply or in chunks."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from penstock.server.http.errors import ApiError, ErrorResponse
from penstock.server.openai.choices import ChoiceDelta
from penstock.server.openai.completion_protocol import Completion, CompletionChoice, CompletionRequest
from penstock.server.openai.logprobs import TokenBytes, completion_logprobs
from penstock.server.openai.prompts import Prompt
from penstock.server.openai.usage import Summary, metrics_of, usage_of


class CompletionWriter:
    """The writer of ``n`` choices for each of the prompts, in their order. It keeps no state."""

    named_events = False

    continues_text = True

    def __init__(
        self,
        body: CompletionRequest,
        prompts: Sequence[Prompt],
        n: int,
        request_id: str,
        model: str,
        token_bytes: TokenBytes,
    ) -> None:
        self._body = body
        self._prompts = prompts
        self._n = n
        self._id, self._model, self._created = f"cmpl-{request_id}", model, int(time.time())
        self._token_bytes = token_bytes

    def whole(self, choices: Sequence[ChoiceDelta], summary: Summary) -> Completion:
        return self._with_summary(self._reply([self._choice(choice) for choice in choices]), summary)

    def chunks(self, delta: ChoiceDelta) -> Iterator[Completion]:
        choice = self._choice(delta)
        if choice.text or delta.finish_reason or delta.logprobs or self._body.return_token_ids:
            reply = self._reply([choice])
            if delta.warning is not None:
                reply.warning = delta.warning
            yield reply

    def last_chunks(self, summary: Summary) -> Iterator[Completion]:
        if self._body.stream_options is not None and self._body.stream_options.include_usage:
            yield self._with_summary(self._reply([]), summary)

    def failure(self, problem: ApiError) -> ErrorResponse:
        return problem.body

    # ---------------------------------------------------------------------------------------------------- inside

    def _reply(self, choices: list[CompletionChoice]) -> Completion:
        reply = Completion(
            id=self._id, object="text_completion", created=self._created, model=self._model, choices=choices
        )
        if self._body.stream_options is not None and self._body.stream_options.include_usage:
            reply.usage = None  # OpenAI sends null in all chunks but the last
        return reply

    def _with_summary(self, reply: Completion, summary: Summary) -> Completion:
        reply.usage, reply.metrics = usage_of(summary), metrics_of(summary)
        return reply

    def _choice(self, delta: ChoiceDelta) -> CompletionChoice:
        prompt = self._prompts[delta.index // self._n]
        choice = CompletionChoice(
            index=delta.index,
            text=prompt.text + delta.content if self._body.echo and delta.first else delta.content,
            logprobs=None,
            finish_reason=delta.finish_reason,
        )
        if delta.logprobs is not None:
            choice.logprobs = completion_logprobs(delta.token_ids, delta.logprobs, self._token_bytes, delta.places)
        if delta.finish_reason is not None:
            choice.stop_reason = delta.stop_reason
        if self._body.return_token_ids:
            choice.token_ids = delta.token_ids
            if delta.first:
                choice.prompt_token_ids = prompt.token_ids
        return choice
