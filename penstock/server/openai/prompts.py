"""From a request's text or messages to token ids, on threads beside the event loop, as a long text takes a while."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from penstock.outlines.dialogue import Dialogue
from penstock.server.http.errors import invalid_field, too_long
from penstock.server.openai.protocol import Message, Tool
from penstock.text.chat import ChatFormat, render_turns, turns_of
from penstock.text.tokenizer import Tokenizer
from penstock.text.workers import aside


@dataclass
class Prompt:
    text: str
    token_ids: list[int]

    @property
    def inputs(self) -> dict[str, Any]:
        """The prompt in the form that the engine takes."""
        return {"prompt": self.text, "prompt_token_ids": self.token_ids}


class Room(NamedTuple):
    """Room behind a prompt: ``tokens`` may follow it; ``of`` is the model's limit on prompt and output together."""

    tokens: int
    of: int


class Prompts:
    """Prompts of one tokenizer. Workers do whatever a client can make expensive; clients take turns in their queue."""

    def __init__(self, tokenizer: Tokenizer, max_model_len: int, allow_special_tokens: bool = False) -> None:
        """``allow_special_tokens``: special tokens in users' texts are special, like the chat template's own."""
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len
        self._allow_special_tokens = allow_special_tokens

    async def of_text(self, text: str, add_special_tokens: bool = True) -> Prompt:
        """A text as a prompt. Raises RequestError for text that is not valid Unicode."""
        return await aside(lambda: Prompt(text, self.tokenizer.encode(text, add_special_tokens)))

    async def of_ids(self, ids: Sequence[int], field: str = "prompt") -> Prompt:
        """Token ids with their text. Raises ApiError naming ``field`` for ids that the model does not have."""

        def decode() -> Prompt:
            last = len(self.tokenizer) - 1
            for token in ids:
                if not 0 <= token <= last:
                    raise invalid_field(field, f"holds {token}; the model's token ids are 0 to {last}")
            return Prompt(self.tokenizer.decode(ids, skip_special_tokens=False), list(ids))

        return await aside(decode)

    async def names(self, ids: Sequence[int]) -> list[str]:
        """The text of each token by itself."""
        return await aside(lambda: [self.tokenizer.decode([one], skip_special_tokens=False) for one in ids])

    async def of_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Prompt:
        """A conversation as a prompt. Raises RequestError if the template refuses it, ApiError naming a field."""
        if self.tokenizer.tool_template is None:
            problem = "need a chat template, and this model has none: give the server one with --chat-template"
            raise invalid_field("messages", f"{problem}, or use /v1/completions")
        turns = turns_of([message.as_turn() for message in messages])
        described = None if not tools else [tool.model_dump(exclude_none=True) for tool in tools]

        def render() -> str:
            given: Any = (turns, described, options)
            if not self._allow_special_tokens:
                given = self.tokenizer.literal.hide(given)
            messages, tools, variables = given
            return render_turns(self.tokenizer, messages, True, tools=tools, options=variables)

        rendered = await aside(render)
        return await aside(lambda: self._encode_chat(rendered))

    def _encode_chat(self, rendered: str) -> Prompt:
        if self._allow_special_tokens:
            return Prompt(rendered, self.tokenizer.encode_rendered(rendered))
        return Prompt(self.tokenizer.literal.show(rendered), self.tokenizer.encode_literal(rendered))

    def room(self, prompt: Prompt, field: str) -> Room:
        """The room behind a prompt. Raises ApiError naming ``field`` if no token fits."""
        room = self.max_model_len - len(prompt.token_ids)
        if not prompt.token_ids:
            raise invalid_field(field, "holds no token; there has to be at least one")
        if room < 1:
            problem = f"is {len(prompt.token_ids)} tokens long, and at least one is to be generated: shorten it."
            raise too_long(field, problem, self.max_model_len)
        return Room(room, self.max_model_len)

    def dialogue(self, messages: Sequence[Message], options: Mapping[str, Any] | None = None) -> Dialogue:
        """A conversation to be answered in points. Raises RequestError as ``of_chat`` does."""
        chat = ChatFormat(chat_template_kwargs=options)
        return Dialogue(self.tokenizer, [message.as_turn() for message in messages], chat)
