"""A question as the prompts that an answer in points takes: guides first, which are the same for every question."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, Final

from penstock.core import RequestError
from penstock.text.chat import ChatFormat, Messages, encoded, rendered, text_in, turns_of
from penstock.text.tokenizer import Tokenizer

BETWEEN: Final = "\n\n"
"""What separates a guide from what follows it, and the messages of a text without a chat template."""


@dataclass(frozen=True)
class Rendered:
    """A prompt as text, in which special tokens that a message holds are hidden, and as token ids.

    ``fixed`` of the ids are the same for every question.
    """

    text: str
    ids: list[int]
    fixed: int = 0


class Dialogue:
    """A conversation that ends with a question, or a text that asks one; as text, without a chat template.

    ``plain`` is the prompt of an ordinary answer. Raises RequestError as ``LLM.chat`` does.
    """

    def __init__(self, tokenizer: Tokenizer, messages: Messages, chat: ChatFormat | None) -> None:
        self._tokenizer = tokenizer
        self._messages = turns_of(messages)
        self._chat = chat
        check_format(chat)
        if self._messages[-1]["role"] != "user":
            raise RequestError(
                "messages do not end with the user's; an answer in points needs a question (outline_decoding)"
            )
        self.question = text_in(self._messages[-1]["content"])

    @property
    def is_chat(self) -> bool:
        return self._chat is not None

    @classmethod
    def of_text(cls, tokenizer: Tokenizer, text: str) -> Dialogue:
        return cls(tokenizer, [{"role": "user", "content": text}], None)

    def plain(self) -> dict[str, Any]:
        """As the engine takes it. A text is continued as it stands."""
        if self._chat is None:
            return {"prompt": self.question, "prompt_token_ids": self._tokenizer.encode(self.question)}
        return encoded(self._tokenizer, rendered(self._tokenizer, self._messages, self._chat))

    def guided(self, guide: str, opening: str = "", question: str | None = None) -> Rendered:
        """Guide, conversation, and how the answer begins. ``question`` stands in place of the conversation."""
        messages = self._messages if question is None else [{"role": "user", "content": question}]
        text = self._render(guide, messages, opening)
        ids, hidden = self._encode(text), self._hide(guide)
        beginning = self._encode(text[: text.index(hidden) + len(hidden)]) if hidden in text else []
        return Rendered(text, ids, common(ids, beginning))

    def followed(
        self, before: Rendered, guide: str, said: str, ids: Sequence[int], asked: str, opening: str
    ) -> Rendered:
        """A guided prompt, what the target ``said`` to it, what it is asked next, and how that answer begins.

        The token ids begin with those of both, so that their keys and values are shared, wherever the template writes
        an earlier answer as it writes the beginning of one.
        """
        more = [{"role": "assistant", "content": said}, {"role": "user", "content": asked}]
        text = self._render(guide, [*self._messages, *more], opening)
        shared = before.text + self._hide(said)
        if not text.startswith(shared):
            return Rendered(text, self._encode(text))
        known = [*before.ids, *takewhile(lambda token: token not in self._tokenizer.eos_token_ids, ids)]
        return Rendered(text, known + self._tokenizer.encode_literal(text[len(shared) :]))

    def shown(self, prompt: Rendered) -> dict[str, Any]:
        """As the engine takes it."""
        text = prompt.text if self._chat is None else self._tokenizer.literal.show(prompt.text)
        return {"prompt": text, "prompt_token_ids": prompt.ids}

    def forks(self, prompt: Rendered, words: Sequence[str]) -> tuple[Rendered, list[int]]:
        """The prompt up to where it would go on with one of these words, and the token of each there.

        No two words begin with the same letter.
        """
        ways = [self._encode(f"{prompt.text} {word}") for word in words]
        same = min(common(ways[0], way) for way in ways[1:])
        tokens = [way[same] for way in ways]
        if len(set(tokens)) == len(words):
            return replace(prompt, ids=ways[0][:same]), tokens
        # The blank is a token of its own before some of the words alone.
        alone = [self._tokenizer.encode(word, add_special_tokens=False)[0] for word in words]
        return replace(prompt, text=prompt.text + " ", ids=self._encode(prompt.text + " ")), alone

    def _render(self, guide: str, messages: Sequence[Mapping[str, Any]], opening: str) -> str:
        if self._chat is None:
            texts = [guide, *(str(message["content"]) for message in messages), opening]
            return BETWEEN.join(texts)
        try:
            text = rendered(self._tokenizer, with_system(guide, messages), self._chat)
        except RequestError:  # a template without system messages
            text = rendered(self._tokenizer, with_first_user(guide, messages), self._chat)
        return text + self._hide(opening)

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text) if self._chat is None else self._tokenizer.encode_literal(text)

    def _hide(self, text: str) -> str:
        """What stands in a message is text; a text without a chat template is taken as it stands."""
        hidden: str = text if self._chat is None else self._tokenizer.literal.hide(text)
        return hidden


def check_format(chat: ChatFormat | None) -> None:
    """Raise RequestError naming what of a chat's format does not go with an answer in points."""
    if chat is None:
        return
    if chat.tools:
        raise RequestError(
            "tools are described to the model; an answer in points calls none: leave outline_decoding off"
        )
    if not chat.add_generation_prompt:
        raise RequestError(
            "add_generation_prompt is False; an answer in points has turns of its own (outline_decoding)"
        )


def with_system(guide: str, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The guide as the system's message, ahead of what the system says already."""
    first, rest = messages[0], messages[1:]
    if first["role"] in ("system", "developer"):
        return [{**first, "content": guide + BETWEEN + str(first["content"])}, *rest]
    return [{"role": "system", "content": guide}, *messages]


def with_first_user(guide: str, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The guide ahead of what the user says first."""
    at = next(i for i, message in enumerate(messages) if message["role"] == "user")
    first = {**messages[at], "content": guide + BETWEEN + str(messages[at]["content"])}
    return [*messages[:at], first, *messages[at + 1 :]]


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many first token ids are the same."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
