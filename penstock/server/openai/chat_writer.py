"""A generation as /v1/chat/completions tells it, at once or in chunks."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from penstock.core import CompletionOutput, FinishReason, Logprob
from penstock.engine.completion import CompletionDelta
from penstock.server.openai.chat_protocol import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionRequest,
    ChatLogprobs,
    FunctionPart,
    FunctionReply,
    MessagePart,
    MessageReply,
    ToolCallPart,
    ToolCallReply,
)
from penstock.server.openai.generation import Generation
from penstock.server.openai.logprobs import chat_logprobs
from penstock.server.openai.protocol import FinishWord
from penstock.server.openai.tools.choice import ToolPlan
from penstock.server.openai.tools.formats import Call
from penstock.server.openai.tools.readers import Said
from penstock.server.openai.usage import metrics_of, usage_of
from penstock.text.tokenizer import Tokenizer


class Voice:
    """One choice: its text goes in as it comes, what there is to say of it comes out."""

    def __init__(self, plan: ToolPlan) -> None:
        self.reader = plan.reader()
        self.spoke = False
        """Whether the first chunk, which names the role, has gone out."""
        self.calls = 0
        """How many there have been, passed on or not."""
        self._single = plan.single

    def hear(self, text: str, ended: bool) -> Said:
        said = self.reader.push(text) if text else Said()
        if ended:
            rest = self.reader.finish()
            said = Said(said.content + rest.content, said.calls + rest.calls)
        return Said(said.content, [call for call in said.calls if self._passes(call)])

    def _passes(self, call: Call) -> bool:
        self.calls += bool(call.name)
        return self.calls <= 1 or not self._single


class ChatWriter:
    def __init__(
        self, body: ChatCompletionRequest, plan: ToolPlan, generation: Generation, model: str, tokenizer: Tokenizer
    ) -> None:
        self._body = body
        self._plan = plan
        self._generation = generation
        self._tokenizer = tokenizer
        self._strips_end = plan.marks_are_special and body.skip_special_tokens is not False
        self._id, self._model, self._created = f"chatcmpl-{generation.request_id}", model, int(time.time())
        self._voices = [Voice(plan) for _ in range(body.n or 1)]

    def whole(self) -> ChatCompletion:
        (output,) = self._generation.outputs()
        reply = ChatCompletion(
            id=self._id,
            object="chat.completion",
            created=self._created,
            model=self._model,
            choices=[self._choice(choice) for choice in output.outputs],
            usage=usage_of(self._generation),
            metrics=metrics_of(self._generation),
        )
        if self._body.return_token_ids:
            reply.prompt_token_ids = output.prompt_token_ids
        return reply

    def chunks(self, delta: CompletionDelta) -> Iterator[ChatCompletionChunk]:
        voice = self._voices[delta.index]
        if not voice.spoke:
            voice.spoke = True
            yield self._first_chunk(delta.index)
        before = voice.calls
        said = voice.hear(self._text(delta), delta.finish_reason is not None)
        part = MessagePart()
        if said.content:
            part.content = said.content
        if said.calls:
            part.tool_calls = self._call_parts(said.calls, before)
        if not (part.model_fields_set or delta.finish_reason or delta.logprobs or self._body.return_token_ids):
            return  # a part of a character, or what may become a call
        choice = ChatChunkChoice(
            index=delta.index,
            delta=part,
            logprobs=self._logprobs(delta.token_ids, delta.logprobs),
            finish_reason=finish_word(delta.finish_reason, voice),
        )
        if delta.finish_reason is not None:
            choice.stop_reason = delta.stop_reason
        if self._body.return_token_ids:
            choice.token_ids = delta.token_ids
        yield self._chunk([choice])

    def last_chunk(self) -> ChatCompletionChunk:
        """After all choices have ended: what it took."""
        chunk = self._chunk([])
        chunk.usage, chunk.metrics = usage_of(self._generation), metrics_of(self._generation)
        return chunk

    # ---------------------------------------------------------------------------------------------------- inside

    def _first_chunk(self, index: int) -> ChatCompletionChunk:
        part = MessagePart(role="assistant", content="")
        chunk = self._chunk([ChatChunkChoice(index=index, delta=part, logprobs=None, finish_reason=None)])
        if self._body.return_token_ids and index == 0:
            chunk.prompt_token_ids = self._generation.streams[0].prompt_token_ids
        return chunk

    def _chunk(self, choices: list[ChatChunkChoice]) -> ChatCompletionChunk:
        chunk = ChatCompletionChunk(
            id=self._id,
            object="chat.completion.chunk",
            created=self._created,
            model=self._model,
            choices=choices,
        )
        if self._body.stream_options is not None and self._body.stream_options.include_usage:
            chunk.usage = None  # as OpenAI has it in all chunks but the last
        return chunk

    def _choice(self, output: CompletionOutput) -> ChatChoice:
        voice = Voice(self._plan)
        said = voice.hear(self._text(output), ended=True)
        calls = merged(said.calls)
        message = MessageReply(role="assistant", content=said.content or (None if calls else ""), refusal=None)
        if calls:
            message.tool_calls = [self._call_reply(call) for call in calls]
        word = finish_word(output.finish_reason, voice)
        assert word is not None
        choice = ChatChoice(
            index=output.index,
            message=message,
            logprobs=self._logprobs(output.token_ids, output.logprobs),
            finish_reason=word,
            stop_reason=output.stop_reason,
        )
        if self._body.return_token_ids:
            choice.token_ids = output.token_ids
        return choice

    def _text(self, piece: CompletionDelta | CompletionOutput) -> str:
        """Without the text of the end token, where special tokens are only in it for the sake of a call's marks."""
        ids, ends = piece.token_ids, self._tokenizer.eos_token_ids
        if self._strips_end and piece.finish_reason is FinishReason.STOP and ids and ids[-1] in ends:
            return piece.text.removesuffix(self._tokenizer.decode(ids[-1:], skip_special_tokens=False))
        return piece.text

    def _logprobs(self, ids: Sequence[int], found: list[dict[int, Logprob]] | None) -> ChatLogprobs | None:
        if found is None:
            return None
        return chat_logprobs(ids, found, self._body.top_logprobs or 0, self._name)

    def _name(self, token: int) -> str:
        return self._tokenizer.decode([token], skip_special_tokens=False)

    def _call_parts(self, calls: list[Call], before: int) -> list[ToolCallPart]:
        parts = []
        for call in calls:
            if call.name:
                before += 1
                function = FunctionPart(name=call.name, arguments=call.arguments)
                parts.append(
                    ToolCallPart(index=before - 1, id=self._plan.format.new_id(), type="function", function=function)
                )
            else:
                parts.append(ToolCallPart(index=before - 1, function=FunctionPart(arguments=call.arguments)))
        return parts

    def _call_reply(self, call: Call) -> ToolCallReply:
        function = FunctionReply(name=call.name, arguments=call.arguments)
        return ToolCallReply(id=self._plan.format.new_id(), type="function", function=function)


def merged(calls: list[Call]) -> list[Call]:
    """Calls with their arguments in one piece."""
    whole: list[Call] = []
    for call in calls:
        if call.name:
            whole.append(Call(call.name, call.arguments))
        else:
            whole[-1].arguments += call.arguments
    return whole


def finish_word(reason: FinishReason | None, voice: Voice) -> FinishWord | None:
    """OpenAI's: a reply that ended by itself and holds calls has ended for their sake."""
    if reason is None:
        return None
    if reason is FinishReason.STOP:
        return "tool_calls" if voice.calls else "stop"
    return "length" if reason is FinishReason.LENGTH else "abort"
