"""Text to token ids and back: a thin layer over the tokenizer that lies beside a Hugging Face checkpoint."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Any

from penstock.core import ConfigError, RequestError

REMEDY = "pass token ids and set skip_tokenizer_init, or copy tokenizer.json into the folder"


class Tokenizer:
    """A fast Hugging Face tokenizer.

    ``eos_token_ids`` are the ids at which a request ends of itself. ``byte_ids`` are the byte-fallback tokens
    (<0x00> to <0xFF>), of which there are none in a byte-level vocabulary. ``len()`` counts added tokens too.
    """

    def __init__(self, inner: Any, eos_token_ids: Sequence[int] = ()) -> None:
        """``inner`` is a transformers tokenizer with a ``tokenizers`` backend; its own EOS joins ``eos_token_ids``."""
        self._inner = inner
        self._backend = inner.backend_tokenizer
        own = () if inner.eos_token_id is None else (inner.eos_token_id,)
        self.eos_token_ids: tuple[int, ...] = tuple(sorted({*own, *eos_token_ids}))
        added = self._backend.get_added_tokens_decoder()
        self._special = frozenset(token_id for token_id, token in added.items() if token.special)
        bytes_ = (self._backend.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
        self.byte_ids: frozenset[int] = frozenset(token_id for token_id in bytes_ if token_id is not None)

    def __len__(self) -> int:
        return len(self._inner)

    def serialized(self) -> str:
        """The tokenizer as the JSON of tokenizer.json, added tokens included, without padding and truncation."""
        backend = copy(self._backend)
        backend.no_padding()
        backend.no_truncation()
        text: str = backend.to_str()
        return text

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Raises RequestError for text that is not Unicode (a lone surrogate, as JSON can carry it)."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"the text is not valid Unicode: {error}") from error
        # Not verbose: whether a text is too long is for whoever asks to say, and a corpus is cut later.
        ids: list[int] = self._inner.encode(text, add_special_tokens=add_special_tokens, verbose=False)
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of all ``ids`` at once, bytes that are not UTF-8 as U+FFFD, ids without a token as nothing.

        Never cleans up spaces before punctuation, whatever the checkpoint's configuration says: that loses characters
        of the text (transformers' own default is off since version 5), and could not be streamed.
        """
        text: str = self._inner.decode(
            list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return text

    def is_silent(self, token_id: int, skip_special_tokens: bool) -> bool:
        """Whether ``decode`` leaves this token out: a special one, or an id of a padded vocabulary."""
        if token_id in self._special:
            return skip_special_tokens
        return self._backend.id_to_token(token_id) is None

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True
    ) -> list[int]:
        """Token ids of a conversation in the checkpoint's own format, special tokens included.

        Raises ConfigError when the checkpoint has no template, RequestError when it refuses these messages.
        """
        return self.encode(self.render(messages, add_generation_prompt), add_special_tokens=False)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """A conversation as text in the checkpoint's own format. Raises as ``apply_chat_template`` does.

        ``tools`` are described to the model where the template ``takes_tools``; ``options`` are further variables of
        the template (``chat_template_kwargs``).
        """
        for name in options or ():
            if name in inspect.signature(self._inner.apply_chat_template).parameters:
                raise RequestError(f"chat_template_kwargs.{name} is no variable of the chat template; remove it")
        given = {**(options or {}), "tools": tools, "add_generation_prompt": add_generation_prompt}
        text: str = self._templated(messages, tokenize=False, **given)
        return text

    @property
    def tool_template(self) -> str | None:
        """The chat template (Jinja) that is used where there are tools; a checkpoint may have one of its own."""
        return None if self._inner.chat_template is None else str(self._inner.get_chat_template(tools=[]))

    def use_chat_template(self, template: str) -> None:
        """Use ``template`` (Jinja) in place of the checkpoint's own. Raises ConfigError if it is none."""
        from jinja2 import TemplateSyntaxError

        self._inner.chat_template = template
        try:
            self.render([{"role": "user", "content": "a"}], True)
        except RequestError as error:
            if isinstance(error.__cause__, TemplateSyntaxError):
                raise ConfigError(f"chat_template is not a Jinja template: {error.__cause__}") from error

    @property
    def marks_answers(self) -> bool:
        """Whether the chat template marks what is the assistant's ({% generation %})."""
        return re.search(r"{%-?\s*generation\b", str(self._inner.chat_template)) is not None

    def encode_marked(self, messages: Sequence[Mapping[str, Any]]) -> tuple[list[int], list[bool]]:
        """Token ids of a conversation, and which are the assistant's, where the template ``marks_answers``."""
        found = self._templated(messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        return list(found["input_ids"]), [bool(mark) for mark in found["assistant_masks"]]

    def encode_with_ends(self, text: str) -> tuple[list[int], list[int]]:
        """Token ids of a rendered text, and where each ends in it, in characters."""
        found = self._backend.encode(text, add_special_tokens=False)
        return list(found.ids), [end for _, end in found.offsets]

    def _templated(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> Any:
        from jinja2 import TemplateError

        if self._inner.chat_template is None:
            raise ConfigError("the checkpoint has no chat template: send a plain prompt to the completions interface")
        try:
            return self._inner.apply_chat_template(list(messages), **options)
        except (TemplateError, TypeError) as error:
            raise RequestError(f"the chat template refuses these messages: {error}") from error


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer of a checkpoint folder. Raises ConfigError when there is none, or only one without a fast form."""
    from transformers import AutoTokenizer

    folder = Path(path)
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder")
    try:
        inner = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(f"{folder} has no tokenizer that loads ({first_line(error)}): {REMEDY}") from error
    if not inner.is_fast:
        raise ConfigError(f"{folder} has only a slow tokenizer: {REMEDY}")
    return Tokenizer(inner, generation_eos(folder))


def generation_eos(folder: Path) -> tuple[int, ...]:
    """The EOS ids of generation_config.json. Chat models end their turns with one that the tokenizer does not name."""
    file = folder / "generation_config.json"
    if not file.is_file():
        return ()
    eos = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
    if eos is None:
        return ()
    return tuple(eos) if isinstance(eos, list) else (eos,)


def first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
