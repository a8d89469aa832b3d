"""A checkpoint's tokenizer, and special tokens in users' text, which stay plain text."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from copy import copy
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from penstock.core import ConfigError, PenstockError, RequestError
from penstock.files import (
    CODE_FIELD,
    CONFIG_FILE,
    TOKENIZER_CONFIG_FILE,
    check_folder,
    code_refusal,
    generation_eos,
    problem_in,
    read_json,
    said,
    shown,
)
from penstock.text.templates import BrokenTemplate, Rendered, in_its_form, render, template_facts
from penstock.text.tokenizer_bounds import TOKENIZER_FILE, PlainTokenizer, check_tokenizer, check_tokenizer_files
from penstock.text.workers import Failed, Job, Overrun, Vocabulary, workers

# -------------------------------------------------------------------------------------------------------------- literal
# Special tokens in users' messages, read as plain text; those that a chat template writes stay special.
#
#       messages   "what is </s>?"            1. a user's special token is hidden as one private character (X)
#       rendered   "<s>user: what is X?</s>"  2. the special tokens here are the template's: they become B and E
#       encoded    "Buser: what is </s>?E"    3. X is text again; a copy of the tokenizer knows <s> and </s> as B and E
#
# The text between the template's tokens is therefore encoded whole, as if no token were called </s>. Where no message
# holds a special token, the tokenizer itself encodes the rendered text.

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

    def hide(self, value: Any, where: str) -> Any:
        """``value``, of JSON's types, with the special tokens in all its texts hidden.

        Raises RequestError, which begins with the path in ``where``, for text that already holds a private character,
        for a value of another type, and for what nests too deep.
        """
        try:
            return self._hidden_but(value, frozenset(), where)
        except RecursionError:
            raise RequestError(f"{where} nests too deep, or holds itself") from None

    def _hidden_but(self, value: Any, seen: frozenset[str], where: str) -> Any:
        """``hide``, but for the texts ``seen``, which the template has to find."""
        if isinstance(value, str):
            if found := PRIVATE.search(value):
                raise RequestError(f"{where} holds U+{ord(found.group()):X}, a private character: remove it")
            return self._any.sub(lambda token: token[0] if token[0] in seen else self._hide[token[0]], value)
        if isinstance(value, dict):
            # A template looks for the end of reasoning in the assistant's turns, and has to see it there.
            if value.get("role") == "assistant":
                seen = self._looked_for()
            return {
                self._hidden_but(key, seen, where): self._hidden_but(item, seen, f"{where}.{key}")
                for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self._hidden_but(item, seen, f"{where}[{number}]") for number, item in enumerate(value)]
        if value is None or isinstance(value, int | float):
            return value
        raise RequestError(f"{where} is of type {type(value).__name__}, which JSON has not")

    def show(self, rendered: str) -> str:
        """The rendered text with its hidden tokens written out."""
        return rendered.translate(self._show)

    def holds_hidden(self, rendered: str) -> bool:
        """Whether a rendered text holds a special token of a user's."""
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
    """Whether a merge names or makes a piece among ``names``."""
    one, other = merge.split(" ") if isinstance(merge, str) else merge
    return one in names or other in names or one + other in names


# ------------------------------------------------------------------------------------------------------------ tokenizer
# Text to token ids and back: a thin layer over the tokenizer of a Hugging Face checkpoint.

PANIC: Final = "PanicException"
"""Name in Python of a panic in the Rust library ``tokenizers``; its class cannot be imported."""

LONG: Final = 1 << 14
"""Characters up to which a text is encoded in this process, which takes milliseconds."""
ENCODE_SECONDS: Final = 10.0
"""Seconds of processor time for a worker to encode a longer text; usual ones take 1 s per million characters."""

TOKENIZER_CLASS: Final = re.compile(r"(?!Auto)\w*(Tokenizer|TokenizerFast|Backend)")
"""Matches the names of tokenizers' classes: transformers takes any of its own class names."""

PRINTABLE: Final = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
"""Bytes that stand for themselves in a byte-level vocabulary."""
BYTE_OF: Final = {chr(byte): byte for byte in PRINTABLE} | {
    chr(0x100 + number): byte for number, byte in enumerate(byte for byte in range(0x100) if byte not in PRINTABLE)
}
"""The byte that each character of a byte-level vocabulary stands for: GPT-2's table."""
BEGINS_CHATS: Final = "conversations_begin_with_bos"
"""Field of the tokenizer_config.json that is made from a GGUF file: whether a conversation begins with BOS, as in
llama.cpp, though its template writes none."""
TEMPLATE_TOKENS: Final = "template_tokens"
"""Another such field: the values of a template's ``bos_token`` and the like, even where these are ordinary tokens."""

TAKEN: Final = frozenset(
    {"messages", "conversation", "tools", "documents", "chat_template", "add_generation_prompt"}
    | {"continue_final_message", "tokenize", "sanitize_control_tokens", "padding", "truncation", "max_length"}
    | {"return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs", "kwargs"}
)
"""Names that no variable of a template may have: the arguments of transformers' ``apply_chat_template``."""
NO_TEMPLATE: Final = "the checkpoint has no chat template: send a plain prompt to the completions interface"
"""The error for a conversation where there is no template."""
REMEDY: Final = "pass token ids and set skip_tokenizer_init, or copy tokenizer.json into the folder"
"""The remedy for a tokenizer that cannot be used, as the end of errors."""


class Tokenizer:
    """A fast Hugging Face tokenizer.

    ``eos_token_ids`` are the ids at which a request ends by default. ``byte_ids`` are the byte-fallback tokens (<0x00>
    to <0xFF>), none in a byte-level vocabulary. ``len()`` counts added tokens too.
    """

    def __init__(self, inner: Any, eos_token_ids: Sequence[int] = ()) -> None:
        """``inner`` is a transformers tokenizer with a ``tokenizers`` backend, or a ``PlainTokenizer``.

        Its own EOS joins ``eos_token_ids``.
        """
        self._inner = inner
        self._backend = inner.backend_tokenizer
        self._one_at_a_time = threading.Lock()
        own = () if inner.eos_token_id is None else (inner.eos_token_id,)
        self.eos_token_ids: tuple[int, ...] = tuple(sorted({*own, *eos_token_ids}))
        added = self._backend.get_added_tokens_decoder()
        self._added = frozenset(added)
        self._template_tokens: dict[str, str] = inner.init_kwargs.get(TEMPLATE_TOKENS) or inner.special_tokens_map
        begins = inner.init_kwargs.get(BEGINS_CHATS)
        self._first = [self._backend.token_to_id(self._template_tokens["bos_token"])] if begins else []
        self._special = frozenset(token_id for token_id, token in added.items() if token.special)
        bytes_ = (self._backend.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
        self.byte_ids: frozenset[int] = frozenset(token_id for token_id in bytes_ if token_id is not None)

    def __len__(self) -> int:
        return len(self._inner)

    def tokens(self) -> dict[int, str]:
        """Every token, added ones too, by its id."""
        return {number: token for token, number in self._backend.get_vocab(with_added_tokens=True).items()}

    def serialized(self) -> str:
        """The tokenizer as the JSON of tokenizer.json, added tokens included, without padding and truncation."""
        backend = copy(self._backend)
        backend.no_padding()
        backend.no_truncation()
        text: str = backend.to_str()
        return text

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The tokenizer in the form that workers load."""
        text = self.serialized()
        return Vocabulary(hashlib.sha256(text.encode()).hexdigest(), text)

    def encode(self, text: str, add_special_tokens: bool = True, field: str = "prompt") -> list[int]:
        """Token ids of a text, from any thread. A worker reads texts longer than ``LONG``. Errors name ``field``.

        Raises RequestError for a text that the tokenizer cannot read, or not within the limits: the text may hold a
        lone surrogate, as JSON can carry it, or characters that a vocabulary without an unknown token lacks.
        """
        with readable(text, field):
            if len(text) > LONG:
                return self._encode_aside(text, field, add_special_tokens=add_special_tokens, literal=False)
            # A call first sets truncation and padding of the shared backend: no two may do so at once.
            with self._one_at_a_time:
                # Not verbose: the caller judges whether a text is too long, and training cuts its corpus later.
                ids: list[int] = self._inner.encode(text, add_special_tokens=add_special_tokens, verbose=False)
        return ids

    def encode_literal(self, rendered: str) -> list[int]:
        """Token ids of a rendered conversation, its hidden tokens encoded as plain text. Raises as ``encode`` does."""
        if not self.literal.holds_hidden(rendered):
            return self.encode_rendered(rendered)
        with readable(rendered, "messages"):
            if len(rendered) > LONG:
                return self.begun(self._encode_aside(rendered, "messages", add_special_tokens=False, literal=True))
            return self.begun(self.literal.encode(rendered))

    def encode_rendered(self, rendered: str) -> list[int]:
        """Token ids of a rendered conversation."""
        return self.begun(self.encode(rendered, add_special_tokens=False, field="messages"))

    def begun(self, ids: list[int]) -> list[int]:
        """The ids of a rendered conversation, with BOS in front where the checkpoint (a GGUF file) asks for it."""
        return ids if ids[:1] == self._first[:1] else self._first + ids

    def _encode_aside(self, text: str, field: str, *, add_special_tokens: bool, literal: bool) -> list[int]:
        given = {"text": text, "add_special_tokens": add_special_tokens, "literal": literal}
        try:
            found = workers().run(Job("encode", given, ENCODE_SECONDS, self.vocabulary))
        except Overrun as overrun:
            raise RequestError(
                f"{field} has {len(text)} characters; the tokenizer's work on it {overrun.what}: shorten it"
            ) from overrun
        except Failed as error:
            raise RequestError(f"{field} cannot be read by the tokenizer ({error.what})") from error
        ids: list[int] = found["ids"]
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of all ``ids`` at once; invalid UTF-8 becomes U+FFFD, and ids without a token become nothing.

        Spaces before punctuation are never cleaned up, whatever the checkpoint's configuration says: that would lose
        characters of the text (transformers' own default is off since version 5), and could not be streamed.
        """
        text: str = self._inner.decode(
            list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token within a text, perhaps part of a character; of a special token those of its name."""
        if token_id in self.byte_ids:
            return bytes([int(self._backend.id_to_token(token_id)[1:-1], 16)])
        piece: str | None = self._backend.id_to_token(token_id)
        if piece is None:
            return b""
        if token_id in self._added:
            return piece.encode()
        if self._is_byte_level and all(character in BYTE_OF for character in piece):
            return bytes(BYTE_OF[character] for character in piece)
        # A token decoded alone loses the space before it: its bytes are those that it adds behind another token.
        before = self.decode([self._ordinary], skip_special_tokens=False)
        both = self.decode([self._ordinary, token_id], skip_special_tokens=False)
        return both.removeprefix(before).encode()

    @cached_property
    def _is_byte_level(self) -> bool:
        """Whether pieces are spelt in GPT-2's letters, one for each byte."""
        return "ByteLevel" in repr(self._backend.decoder)

    @cached_property
    def _ordinary(self) -> int:
        """A token that any other text may follow."""
        return next(one for one in self.encode("a", add_special_tokens=False)[::-1] if one not in self.byte_ids)

    def is_silent(self, token_id: int, skip_special_tokens: bool) -> bool:
        """Whether ``decode`` leaves this token out: a skipped special token, or an id of a padded vocabulary."""
        if token_id in self._special:
            return skip_special_tokens
        return self._backend.id_to_token(token_id) is None

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True
    ) -> list[int]:
        """Token ids of a conversation in the checkpoint's own format, special tokens included.

        The template is a program written by the checkpoint's author. It runs in a process of its own, with limits on
        time, memory and size.

        Raises ConfigError when the checkpoint has no template, RequestError when it refuses them.
        """
        return self.encode_rendered(self.render(messages, add_generation_prompt))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
        continue_final_message: bool = False,
    ) -> str:
        """A conversation as text in the checkpoint's own format, or in that of ``chat_template``.

        ``tools`` are described to the model if the template reads them; ``options`` are further variables of the
        template (``chat_template_kwargs``). Raises as ``apply_chat_template`` does.
        """
        return self._rendered(
            messages,
            options or {},
            tools=tools,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        ).text

    def _rendered(
        self,
        messages: Sequence[Mapping[str, Any]],
        options: Mapping[str, Any],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        **asked: bool,
    ) -> Rendered:
        """Render as transformers' ``apply_chat_template`` does, with limits on time and size."""
        if self._inner.chat_template is None and chat_template is None:
            raise ConfigError(NO_TEMPLATE)
        self._check_variables(options)
        if not messages:
            raise RequestError("messages is []; there has to be at least one")
        try:
            template = str(self._inner.get_chat_template(chat_template, tools))
        except ValueError as error:  # several templates by name, and none is the default
            raise ConfigError(f"chat_template: {error}") from error
        reading = template_facts(template)
        turns = in_its_form(
            [{key: value for key, value in turn.items() if value is not None} for turn in messages], reading
        )
        variables = {**self._template_tokens, **options}
        job = {**variables, "chat_template": template, "conversations": [turns], "tools": tools, **asked}
        return render(job)

    @cached_property
    def literal(self) -> LiteralText:
        """The encoder of texts in which users' special tokens are plain text."""
        return LiteralText(self._backend, self._looked_for)

    def _looked_for(self) -> frozenset[str]:
        """The texts that the template searches messages for, which must therefore not be hidden in them."""
        template = self.tool_template
        return frozenset() if template is None else template_facts(template).looked_for

    def _check_variables(self, names: Iterable[str]) -> None:
        """Raise RequestError for a variable that would be an argument of transformers' function."""
        for name in names:
            if name in TAKEN:
                raise RequestError(f"chat_template_kwargs.{name} is no variable of the chat template; remove it")

    @property
    def is_of_chat(self) -> bool:
        """Whether the checkpoint is a chat model: its template writes more than the messages' content and BOS.

        A base model may have a template, too, so that it can be used through a chat interface.
        """
        if self._inner.chat_template is None:
            return False
        try:
            rendered = self.render([{"role": "user", "content": "a"}], True)
        except RequestError:  # a template that needs more of a conversation is a chat model's
            return True
        return rendered.removeprefix(self._inner.bos_token or "").strip() != "a"

    @property
    def tool_template(self) -> str | None:
        """The chat template (Jinja) that applies where there are tools: a checkpoint may have one for them."""
        return None if self._inner.chat_template is None else str(self._inner.get_chat_template(tools=[]))

    def use_chat_template(self, template: str) -> None:
        """Use ``template`` (Jinja) in place of the checkpoint's own.

        Raises ConfigError if it is not Jinja, or exceeds its time or memory.
        """
        try:
            self.render([{"role": "user", "content": "a"}], True, chat_template=template)
        except BrokenTemplate as error:
            raise ConfigError(str(error).replace("messages: the chat template", "chat_template", 1)) from error
        except RequestError:
            pass  # it only wants other messages
        self._inner.chat_template = template

    @property
    def marks_answers(self) -> bool:
        """Whether the chat template marks the assistant's part ({% generation %})."""
        return re.search(r"{%-?\s*generation\b", str(self._inner.chat_template)) is not None

    def encode_marked(self, messages: Sequence[Mapping[str, Any]]) -> tuple[list[int], list[bool]]:
        """Token ids of a conversation, and which are the assistant's, if the template ``marks_answers``."""
        text, marked = self._rendered(messages, {}, return_assistant_tokens_mask=True)
        ids, ends = self.encode_with_ends(text)
        mask = [False] * len(ids)
        # The tokens that overlap the characters [first, last); token i covers [ends[i - 1], ends[i]).
        for first, last in marked:
            begins, after = bisect_right(ends, first), bisect_left(ends, last) + 1
            mask[begins:after] = [True] * len(mask[begins:after])
        begun = self.begun(ids)
        return begun, [False] * (len(begun) - len(ids)) + mask

    def encode_with_ends(self, text: str) -> tuple[list[int], list[int]]:
        """Token ids of a rendered text, and the character at which each one ends."""
        found = self._backend.encode(text, add_special_tokens=False)
        return list(found.ids), [end for _, end in found.offsets]


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer of a checkpoint folder.

    Raises ConfigError when there is none, only a slow one, one that needs the checkpoint's own code, or files from
    which no tokenizer can be made.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder")
    # All checks come before any library reads the folder.
    check_folder(folder)
    check_tokenizer_files(folder)
    check_tokenizer_class(folder)
    check_own_tokenizer(folder)
    eos = generation_eos(folder)
    with usable_tokenizer(folder):
        inner = _from_folder(folder)
        if not (folder / TOKENIZER_FILE).is_file():  # transformers made it from other files
            check_tokenizer(folder, inner.backend_tokenizer.to_str())
        tokenizer = Tokenizer(inner, eos)
        # A tokenizer that cannot work at all fails here, not at the first request.
        tokenizer.decode(inner.encode("a"))
    return tokenizer


def _from_folder(folder: Path) -> Any:
    """The tokenizer in a folder; one that was made from a GGUF file needs no transformers.

    Raises ConfigError if it is a slow one, and errors of transformers.
    """
    if BEGINS_CHATS in read_json(folder / TOKENIZER_CONFIG_FILE) and (folder / TOKENIZER_FILE).is_file():
        return PlainTokenizer(folder)
    from transformers import AutoTokenizer

    inner = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    if not inner.is_fast:
        raise ConfigError(f"{folder} has only a slow tokenizer: {REMEDY}")
    return inner


def usable_tokenizer(folder: Path) -> AbstractContextManager[None]:
    """A context in which any error of a library about the tokenizer in ``folder`` becomes a ConfigError."""
    return refused_as(ConfigError, f"model: {folder} has no tokenizer that loads; {REMEDY}")


@contextlib.contextmanager
def readable(text: str, field: str) -> Iterator[None]:
    """A context in which a text that the tokenizer cannot read is a RequestError that begins with ``field``."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        problem = f"holds U+{code:04X} at {error.start}, half of a surrogate pair, which is no character; take it out"
        raise RequestError(f"{field} {problem}") from error
    with refused_as(RequestError, f"{field} cannot be read by the tokenizer"):
        yield


@contextlib.contextmanager
def refused_as(kind: type[PenstockError], problem: str) -> Iterator[None]:
    """A context in which errors other than Penstock's become ``kind``. A panic of tokenizers is no Exception."""
    try:
        yield
    except PenstockError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != PANIC:
            raise
        raise kind(f"{problem} ({said(error)})") from error


def check_tokenizer_class(folder: Path) -> None:
    """Raise ConfigError unless the tokenizer's class, where one is named, is a tokenizer's.

    transformers accepts any of its own class names there, even those of models and of its Auto classes.
    """
    for name in (TOKENIZER_CONFIG_FILE, CONFIG_FILE):
        file = folder / name
        stated = read_json(file).get("tokenizer_class")
        if stated is not None and not (isinstance(stated, str) and TOKENIZER_CLASS.fullmatch(stated)):
            raise problem_in(file, "tokenizer_class", f"is {shown(stated)}; it has to be the name of a tokenizer")


def check_own_tokenizer(folder: Path) -> None:
    """Raise ConfigError if only the checkpoint's own code could make its tokenizer."""
    file = folder / TOKENIZER_CONFIG_FILE
    table = read_json(file)
    if not (asked := table.get(CODE_FIELD)):
        return
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES, tokenizer_class_from_name

    if (named := table.get("tokenizer_class")) is None:
        model_type = read_json(folder / CONFIG_FILE).get("model_type")
        if not (isinstance(model_type, str) and model_type in TOKENIZER_MAPPING_NAMES):
            raise code_refusal(file, asked, f"tokenizer for a model of type {shown(model_type)}")
    elif not any(tokenizer_class_from_name(name) for name in (named, named.removesuffix("Fast"), f"{named}Fast")):
        raise code_refusal(file, asked, f"tokenizer called {shown(named)}")
