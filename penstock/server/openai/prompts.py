"""From a request's text or messages to token ids: on a thread of its own, since a long text takes a while."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from penstock.outlines.dialogue import Dialogue
from penstock.server.http.errors import invalid_field
from penstock.server.openai.chat_protocol import Message, Tool
from penstock.text.chat import ChatFormat, turns_of
from penstock.text.template_process import PROCESSES
from penstock.text.tokenizer import Tokenizer

T = TypeVar("T")


@dataclass
class Prompt:
    text: str
    token_ids: list[int]


class Prompts:
    """Encodes prompts one after another; the tokenizer is not made for several threads at once.

    Chat templates are rendered elsewhere: who waits for one leaves the tokenizer to the others.
    """

    def __init__(self, tokenizer: Tokenizer, max_model_len: int, allow_special_tokens: bool = False) -> None:
        """``allow_special_tokens``: those in a conversation's texts are special, as the chat template's own are."""
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len
        self._allow_special_tokens = allow_special_tokens
        self._template_threads = ThreadPoolExecutor(PROCESSES, "penstock-templates")
        self._thread = ThreadPoolExecutor(1, "penstock-prompts")

    async def of_text(self, text: str, add_special_tokens: bool = True) -> Prompt:
        """Raises RequestError for text that is not Unicode."""
        return await self.aside(lambda: Prompt(text, self.tokenizer.encode(text, add_special_tokens)))

    async def of_ids(self, ids: Sequence[int], field: str = "prompt") -> Prompt:
        """Token ids with their text. Raises ApiError naming ``field`` for ids that the model does not have."""

        def decode() -> Prompt:
            last = len(self.tokenizer) - 1
            for token in ids:
                if not 0 <= token <= last:
                    raise invalid_field(field, f"holds {token}; the model's token ids are 0 to {last}")
            return Prompt(self.tokenizer.decode(ids, skip_special_tokens=False), list(ids))

        return await self.aside(decode)

    async def names(self, ids: Sequence[int]) -> list[str]:
        """Each token's text by itself."""
        return await self.aside(lambda: [self.tokenizer.decode([one], skip_special_tokens=False) for one in ids])

    async def of_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Prompt:
        """Raises RequestError when the template refuses the messages, ApiError naming the field for all else."""
        if self.tokenizer.tool_template is None:
            problem = "need a chat template, and this model has none: give the server one with --chat-template"
            raise invalid_field("messages", f"{problem}, or use /v1/completions")
        turns = turns_of([message.model_dump(exclude_none=True) for message in messages])
        described = None if not tools else [tool.model_dump(exclude_none=True) for tool in tools]

        def render() -> str:
            given: Any = (turns, described, options)
            if not self._allow_special_tokens:
                given = self.tokenizer.literal.hide(given)
            messages, tools, variables = given
            return self.tokenizer.render(messages, True, tools=tools, options=variables)

        rendered = await asyncio.get_running_loop().run_in_executor(self._template_threads, render)
        return await self.aside(lambda: self._encode_chat(rendered))

    def _encode_chat(self, rendered: str) -> Prompt:
        if self._allow_special_tokens:
            return Prompt(rendered, self.tokenizer.encode_rendered(rendered))
        return Prompt(self.tokenizer.literal.show(rendered), self.tokenizer.encode_literal(rendered))

    def room(self, prompt: Prompt, field: str) -> int:
        """How many tokens may follow a prompt. Raises ApiError naming ``field`` if none may."""
        room = self.max_model_len - len(prompt.token_ids)
        if not prompt.token_ids:
            raise invalid_field(field, "holds no token; there has to be at least one")
        if room < 1:
            raise invalid_field(
                field,
                f"is {len(prompt.token_ids)} tokens long; the model takes {self.max_model_len}, at least one of them "
                "generated: shorten it",
            )
        return room

    def dialogue(self, messages: Sequence[Message], options: Mapping[str, Any] | None = None) -> Dialogue:
        """A conversation whose answer is to be decoded in points. Raises RequestError as ``of_chat`` does."""
        chat = ChatFormat(chat_template_kwargs=options)
        return Dialogue(self.tokenizer, [message.model_dump(exclude_none=True) for message in messages], chat)

    async def aside(self, work: Callable[[], T]) -> T:
        """Have work done where prompts are encoded."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)
