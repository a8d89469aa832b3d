"""Special tokens in what users write, taken as text; those that a chat template writes stay special.

      messages   "what is </s>?"            a special token in a user's text is hidden as one private character
      rendered   "<s>user: what is X?</s>"  whatever is there now the template has written: other private characters
      encoded    "Buser: what is </s>?E"    by a copy of the tokenizer that knows its special tokens by these

So the text between the template's tokens is encoded whole, as if no token had that name. Where no message holds a
special token, the tokenizer itself encodes the rendered text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cached_property
from typing import Any, Final

from penstock.core import RequestError

HIDDEN: Final = 0x10C000
"""The first of the private characters that stand for a user's special tokens."""
WRITTEN: Final = 0x10E000
"""The first of those that stand for a template's."""
MOST: Final = 0x1FFE
PRIVATE: Final = re.compile(f"[{chr(HIDDEN)}-{chr(0x10FFFF)}]")
"""The last of Unicode, of which no known font has a sign."""


class LiteralText:
    """``backend`` is a tokenizer of ``tokenizers``; its special tokens are those that are marked as such there.

    ``looked_for`` says which texts the chat template looks for in messages: what the assistant has said before is
    shown to it with those, as with the end of a reasoning that it cuts.
    """

    def __init__(self, backend: Any, looked_for: Callable[[], frozenset[str]] = frozenset) -> None:
        self._backend = backend
        self._looked_for = looked_for
        added = backend.get_added_tokens_decoder().items()
        self._special = {token.content: token_id for token_id, token in added if token.special}
        self._tokens = list(self._special)[:MOST]
        longest_first = sorted(self._tokens, key=len, reverse=True)
        self._any = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._hide = {token: chr(HIDDEN + number) for number, token in enumerate(self._tokens)}
        self._write = {token: chr(WRITTEN + number) for number, token in enumerate(self._tokens)}
        self._show = {ord(hidden): token for token, hidden in self._hide.items()}
        self._hidden = re.compile(f"[{''.join(self._hide.values())}]" if self._tokens else "(?!)")

    def hide(self, value: Any) -> Any:
        """``value``, of JSON's types, with its special tokens hidden wherever it holds text.

        Raises RequestError for text with the characters that hide them.
        """
        return self._hidden_but(value, frozenset())

    def _hidden_but(self, value: Any, seen: frozenset[str]) -> Any:
        if isinstance(value, str):
            if found := PRIVATE.search(value):
                raise RequestError(f"the text holds U+{ord(found.group()):X}, a private character: remove it")
            return self._any.sub(lambda token: token[0] if token[0] in seen else self._hide[token[0]], value)
        if isinstance(value, dict):
            if value.get("role") == "assistant":
                seen = self._looked_for()
            return {self._hidden_but(key, seen): self._hidden_but(item, seen) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._hidden_but(item, seen) for item in value]
        return value

    def show(self, rendered: str) -> str:
        """A rendered text as it would be with nothing hidden."""
        return rendered.translate(self._show)

    def holds_hidden(self, rendered: str) -> bool:
        return self._hidden.search(rendered) is not None

    def encode(self, rendered: str) -> list[int]:
        """Token ids of a rendered text, in which what is hidden is text."""
        written = self._any.sub(lambda token: self._write[token.group()], rendered)
        ids = self._renamed.encode(self.show(written), add_special_tokens=False).ids
        return [self._own_ids.get(token_id, token_id) for token_id in ids]

    @cached_property
    def _renamed(self) -> Any:
        """The tokenizer, but that its special tokens have other names."""
        from tokenizers import Tokenizer

        data = json.loads(self._backend.to_str())
        rename(data, self._write)
        return Tokenizer.from_str(json.dumps(data))

    @cached_property
    def _own_ids(self) -> dict[int, int]:
        """From the copy's ids of special tokens to the tokenizer's: what is no part of the model is numbered anew."""
        return {self._renamed.token_to_id(self._write[token]): self._special[token] for token in self._tokens}


def rename(data: dict[str, Any], names: dict[str, str]) -> None:
    """Give the special tokens of a tokenizer.json other names, so that no text is ever read as one of them."""
    for token in data["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    model = data["model"]
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        model["vocab"] = {names.get(piece, piece): number for piece, number in vocabulary.items()}
    else:
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in vocabulary]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    if "merges" in model:
        model["merges"] = [merge for merge in model["merges"] if not makes_one_of(merge, names)]
    data |= {"post_processor": None, "truncation": None, "padding": None}


def makes_one_of(merge: str | list[str], names: dict[str, str]) -> bool:
    one, other = merge.split(" ") if isinstance(merge, str) else merge
    return one in names or other in names or one + other in names
