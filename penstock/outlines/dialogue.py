"""Answers in points (Jupiter, section V): the guides, and the prompt of each step."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any, Final

from penstock.core import RequestError
from penstock.text.chat import ChatFormat, Messages, encoded, rendered, text_in, turns_of
from penstock.text.tokenizer import Tokenizer

# ------------------------------------------------------------------------------------------------------------- dialogue
# A question as the prompts of an answer in points: guides come first, as they are the same for every question.

BETWEEN: Final = "\n\n"
"""Separator between a guide and what follows it, and between the messages of a text without a chat template."""


@dataclass(frozen=True)
class Rendered:
    """A prompt as text, in which special tokens of messages are hidden (``text/tokenizer.py``), and as token ids.

    The first ``fixed`` of the ids are the same for every question.
    """

    text: str
    ids: list[int]
    fixed: int = 0


class Dialogue:
    """A conversation that ends with a question; if ``chat`` is None, a plain text that asks one.

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
        """The prompt of an ordinary answer, for the engine. A text is continued as it stands."""
        if self._chat is None:
            return {"prompt": self.question, "prompt_token_ids": self._tokenizer.encode(self.question)}
        return encoded(self._tokenizer, rendered(self._tokenizer, self._messages, self._chat))

    def guided(self, guide: str, opening: str = "", question: str | None = None) -> Rendered:
        """The prompt of guide, conversation (or ``question`` instead) and the answer's ``opening``."""
        messages = self._messages if question is None else [{"role": "user", "content": question}]
        text = self._render(guide, messages, opening)
        ids, hidden = self._encode(text), self._hide(guide)
        # A token may reach over the guide's end: only the ids that both texts have in common are fixed.
        beginning = self._encode(text[: text.index(hidden) + len(hidden)]) if hidden in text else []
        return Rendered(text, ids, common(ids, beginning))

    def followed(
        self, before: Rendered, guide: str, said: str, ids: Sequence[int], asked: str, opening: str
    ) -> Rendered:
        """The prompt that continues ``before``: the target's answer ``said``, the next question, and ``opening``.

        The token ids begin with those of ``before`` and of the answer (``ids``), so that keys and values are reused,
        provided that the template writes an earlier answer as it writes the beginning of one.
        """
        more = [{"role": "assistant", "content": said}, {"role": "user", "content": asked}]
        text = self._render(guide, [*self._messages, *more], opening)
        shared = before.text + self._hide(said)
        if not text.startswith(shared):
            return Rendered(text, self._encode(text))
        known = [*before.ids, *takewhile(lambda token: token not in self._tokenizer.eos_token_ids, ids)]
        return Rendered(text, known + self._tokenizer.encode_literal(text[len(shared) :]))

    def shown(self, prompt: Rendered) -> dict[str, Any]:
        """The prompt, for the engine: hidden tokens are written out in its text."""
        text = prompt.text if self._chat is None else self._tokenizer.literal.show(prompt.text)
        return {"prompt": text, "prompt_token_ids": prompt.ids}

    def forks(self, prompt: Rendered, words: Sequence[str]) -> tuple[Rendered, list[int]]:
        """The prompt up to where it would go on with one of these words, and each word's first token there.

        No two words may begin with the same letter.
        """
        ways = [self._encode(f"{prompt.text} {word}") for word in words]
        # The words' tokens may begin with common ones, as a token for the space: the fork is where they first differ.
        same = min(common(ways[0], way) for way in ways[1:])
        tokens = [way[same] for way in ways]
        if len(set(tokens)) == len(words):
            return replace(prompt, ids=ways[0][:same]), tokens
        # In some tokenizers the space is a token of its own before a part of the words only.
        alone = [self._tokenizer.encode(word, add_special_tokens=False)[0] for word in words]
        return replace(prompt, text=prompt.text + " ", ids=self._encode(prompt.text + " ")), alone

    def _render(self, guide: str, messages: Sequence[Mapping[str, Any]], opening: str) -> str:
        if self._chat is None:
            texts = [guide, *(str(message["content"]) for message in messages), opening]
            return BETWEEN.join(texts)
        try:
            text = rendered(self._tokenizer, with_system(guide, messages), self._chat)
        except RequestError:  # the template allows no system message
            text = rendered(self._tokenizer, with_first_user(guide, messages), self._chat)
        return text + self._hide(opening)

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text) if self._chat is None else self._tokenizer.encode_literal(text)

    def _hide(self, text: str) -> str:
        """A message's text with its special tokens hidden; without a chat template the text itself."""
        hidden: str = text if self._chat is None else self._tokenizer.literal.hide(text)
        return hidden


def check_format(chat: ChatFormat | None) -> None:
    """Raise RequestError, naming the field, for a chat format that excludes an answer in points."""
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
    """The messages with the guide as system message, in front of any system message's own text."""
    first, rest = messages[0], messages[1:]
    if first["role"] in ("system", "developer"):
        return [{**first, "content": guide + BETWEEN + str(first["content"])}, *rest]
    return [{"role": "system", "content": guide}, *messages]


def with_first_user(guide: str, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The messages with the guide in front of the user's first message."""
    at = next(i for i, message in enumerate(messages) if message["role"] == "user")
    first = {**messages[at], "content": guide + BETWEEN + str(messages[at]["content"])}
    return [*messages[:at], first, *messages[at + 1 :]]


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the common prefix of two lists of token ids."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


# ---------------------------------------------------------------------------------------------------------------- guide
# Guide prompts: instructions to the target ahead of a question, in the question's language.

GUIDES: Final = Path(__file__).parent / "guides"
DEFAULT: Final = "en"
KINDS: Final = ("list", "code", "math", "short", "text")
"""Forms that an answer can have. Only "list" is decoded in points."""
WORD: Final = re.compile(r"[\u3040-\u30ff\u4e00-\u9fff]|[^\W\u3040-\u30ff\u4e00-\u9fff]+")
"""Pattern of a word, or of one character in languages that write without spaces."""


@dataclass(frozen=True, kw_only=True)
class Guide:
    """One language's texts. ``labels``, ``shots`` and ``samples`` have ``KINDS`` as keys."""

    language: str
    words: frozenset[str]
    """The language's commonest words and those of its guide, by which a question's language is recognised."""
    code_words: list[str]
    """Words that show that a question asks for a program; a question that holds one by chance is answered plainly."""
    decide: str
    """Instruction for naming the form of an answer; ends with examples."""
    ask: str
    """Text of a question in the prompt for its form, with the placeholder ``{question}``."""
    opening: str
    """Text in front of the label."""
    labels: dict[str, str]
    """The label of each form, one word; no two begin with the same letter."""
    samples: dict[str, list[str]]
    """Questions of each form, equally many of each, from which the target's bias for labels is learned."""
    outline: str
    """Instruction for writing an outline, which also precedes each point."""
    point: str
    """Request for one point, with the placeholders ``{number}`` and ``{title}``."""


def decision(table: dict[str, Any], labels: dict[str, str], shots: dict[str, list[str]]) -> str:
    """The instruction for naming a form, with examples in which the forms take turns."""
    rounds = [list(zip(KINDS, some, strict=True)) for some in zip(*(shots[kind] for kind in KINDS), strict=True)]
    ask, opening = str(table["ask"]), str(table["opening"])
    examples = [f"{ask.format(question=shot)}\n{opening} {labels[kind]}" for one in rounds for kind, shot in one]
    return "\n\n".join([str(table["decide"]).strip(), *examples])


@cache
def guides() -> dict[str, Guide]:
    """All guides, by language."""
    return {file.stem: read_guide(file) for file in sorted(GUIDES.glob("*.toml"))}


def read_guide(file: Path) -> Guide:
    table = tomllib.loads(file.read_text(encoding="utf-8"))
    labels, shots = table.pop("labels"), table.pop("shots")
    table["decide"] = decision(table, labels, shots)
    texts: dict[str, Any] = {name: text.strip() if isinstance(text, str) else text for name, text in table.items()}
    texts["code_words"] = table["code_words"].split()
    texts["words"] = frozenset(WORD.findall(str(texts).lower()))
    return Guide(language=file.stem, labels=labels, **texts)


def guide_for(question: str) -> Guide:
    """The guide of the language with most of the question's words; English where none has any."""
    words = Counter(WORD.findall(question.lower()))
    found = {name: sum(words[word] for word in guide.words) for name, guide in guides().items()}
    # Among equals English wins.
    best = max(found, key=lambda name: (found[name], name == DEFAULT))
    return guides()[best if found[best] else DEFAULT]
