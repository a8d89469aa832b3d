"""Special tokens in users' messages, read as plain text; those that a chat template writes stay special.

      messages   "what is </s>?"            1. a user's special token is hidden as one private character (X)
      rendered   "<s>user: what is X?</s>"  2. the special tokens here are the template's: they become B and E
      encoded    "Buser: what is </s>?E"    3. X is text again; a copy of the tokenizer knows <s> and </s> as B and E

The text between the template's tokens is therefore encoded whole, as if no token were called </s>. Where no message
holds a special token, the tokenizer itself encodes the rendered text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cached_property
from typing import Any, Final

from penstock.core import RequestError

HIDDEN: Final = 0x10C000
"""First of the private characters that stand for special tokens in users' texts."""
WRITTEN: Final = 0x10E000
"""First of the private characters that stand for special tokens written by the template."""
MOST: Final = 0x1FFE
"""Most special tokens that can be told apart: as many private characters as fit behind HIDDEN and behind WRITTEN."""
PRIVATE: Final = re.compile(f"[{chr(HIDDEN)}-{chr(0x10FFFF)}]")
"""The end of Unicode's last private-use plane, for which no known font has glyphs."""


class LiteralText:
    """The special tokens of one tokenizer, hidden in messages and encoded as text.

    ``backend`` is a tokenizer of the library ``tokenizers``, which marks its special tokens. ``looked_for`` gives the
    texts that the chat template searches messages for, as the end of the reasoning that it cuts off. They are not
    hidden in the assistant's messages.
    """

    def __init__(self, backend: Any, looked_for: Callable[[], frozenset[str]] = frozenset) -> None:
        self._backend = backend
        self._looked_for = looked_for
        added = backend.get_added_tokens_decoder().items()
        self._special = {token.content: token_id for token_id, token in added if token.special}
        self._tokens = list(self._special)[:MOST]
        # A regular expression takes the first alternative that matches: a token may be the beginning of another.
        longest_first = sorted(self._tokens, key=len, reverse=True)
        self._any = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._hide = {token: chr(HIDDEN + number) for number, token in enumerate(self._tokens)}
        self._write = {token: chr(WRITTEN + number) for number, token in enumerate(self._tokens)}
        self._show = {ord(hidden): token for token, hidden in self._hide.items()}
        self._hidden = re.compile(f"[{''.join(self._hide.values())}]" if self._tokens else "(?!)")

    def hide(self, value: Any) -> Any:
        """``value``, of JSON's types, with the special tokens in all its texts hidden.

        Raises RequestError for text that already holds one of the private characters.
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
        """The rendered text with its hidden tokens written out."""
        return rendered.translate(self._show)

    def holds_hidden(self, rendered: str) -> bool:
        return self._hidden.search(rendered) is not None

    def encode(self, rendered: str) -> list[int]:
        """Token ids of a rendered text; hidden tokens are encoded as plain text."""
        # The template's tokens are replaced before the hidden ones are shown: afterwards both would look alike.
        written = self._any.sub(lambda token: self._write[token.group()], rendered)
        ids = self._renamed.encode(self.show(written), add_special_tokens=False).ids
        return [self._own_ids.get(token_id, token_id) for token_id in ids]

    @cached_property
    def _renamed(self) -> Any:
        """A copy of the tokenizer in which private characters are the names of the special tokens."""
        from tokenizers import Tokenizer

        data = json.loads(self._backend.to_str())
        rename(data, self._write)
        return Tokenizer.from_str(json.dumps(data))

    @cached_property
    def _own_ids(self) -> dict[int, int]:
        """Token ids of the copy's special tokens to the tokenizer's: the copy renumbers those outside the model."""
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
        # A merge that names a renamed piece would not load, since the vocabulary lacks that piece now.
        model["merges"] = [merge for merge in model["merges"] if not makes_one_of(merge, names)]
    # A rendered text has its special tokens already: none are added, and nothing is cut or padded.
    data |= {"post_processor": None, "truncation": None, "padding": None}


def makes_one_of(merge: str | list[str], names: dict[str, str]) -> bool:
    one, other = merge.split(" ") if isinstance(merge, str) else merge
    return one in names or other in names or one + other in names
