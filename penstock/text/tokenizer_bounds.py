"""Limits on what a tokenizer's files may make of a text, checked before any library is given them.

``tokenizers`` does whatever the files say. A normalizer or decoder that replaces one character by a million, or forty
that double it, use up all memory at the first text, and a failed allocation there ends the process.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
from tokenizers import Tokenizer

from penstock.core import ConfigError
from penstock.files import MORE_TEMPLATES, TOKENIZER_CONFIG_FILE, problem_in, read_json, said, shown

# ----------------------------------------------------------------------------------------------------- tokenizer bounds
# The files' sizes, and how much longer each step of a tokenizer may make a text or a token.

TOKENIZER_FILE: Final = "tokenizer.json"
"""The file that ``tokenizers`` reads."""
MOST_BYTES: Final = 256 << 20
"""Most bytes of one file of a tokenizer. The largest known ones take 40 MiB."""
TOKENIZER_FILES: Final = (
    TOKENIZER_FILE,
    TOKENIZER_CONFIG_FILE,
    "added_tokens.json",
    "special_tokens_map.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
)
"""Files of a tokenizer whose sizes are limited."""
MOST_ADDED: Final = 1 << 16
"""Most added tokens: this many take a second and 85 MiB. Known tokenizers have up to 9,000."""
MOST_GROWTH: Final = 256
"""Most characters that a normalizer may make of one. Unicode's normal forms make at most 18."""
MOST_PER_TOKEN: Final = 8192
"""Most characters to which a token may decode. The longest known tokens have 1,024."""
MOST_AFFIX: Final = 256
"""Most characters of an affix, which is put before or behind a word or a text. Known ones have one or two, like
"##"."""
MOST_AROUND: Final = 256
"""Most special tokens that a post-processor may put around a text. Known ones put one or two there."""
AFFIXES: Final = frozenset({"prefix", "suffix", "prepend", "continuing_subword_prefix", "end_of_word_suffix"})
"""Fields that hold an affix."""
ADDED_FIELDS: Final = ("added_tokens_decoder", "additional_special_tokens", "extra_special_tokens")
"""Fields of tokenizer_config.json and special_tokens_map.json that hold added tokens."""


class Model(msgspec.Struct):
    """The checked fields of ``model`` in tokenizer.json."""

    vocab: Any = None
    continuing_subword_prefix: Any = None
    end_of_word_suffix: Any = None
    unk_token: Any = None


class Stated(msgspec.Struct):
    """The checked fields of tokenizer.json."""

    normalizer: Any = None
    pre_tokenizer: Any = None
    post_processor: Any = None
    decoder: Any = None
    added_tokens: Any = None
    model: Model = msgspec.field(default_factory=Model)


def check_tokenizer_files(folder: Path) -> None:
    """Raise ConfigError, naming file and field, for a tokenizer that could make too much of a text."""
    for name in TOKENIZER_FILES:
        file = folder / name
        if file.is_file() and file.stat().st_size > MOST_BYTES:
            size = file.stat().st_size
            raise ConfigError(f"model: {file} is {size} bytes large; a tokenizer's file may have {MOST_BYTES}")
    for name in (TOKENIZER_CONFIG_FILE, "special_tokens_map.json", "added_tokens.json"):
        table = read_json(folder / name)
        fields = {"": table} if name == "added_tokens.json" else {field: table.get(field) for field in ADDED_FIELDS}
        for field, value in fields.items():
            check_added(folder / name, field or "the file", value)
    file = folder / TOKENIZER_FILE
    if file.is_file():
        check_tokenizer(file, file.read_bytes())


def check_tokenizer(file: Path, content: bytes | str) -> None:
    """Raise ConfigError for an unacceptable tokenizer.json. ``content`` is its text, and errors name ``file``."""
    try:
        stated = msgspec.json.decode(content, type=Stated)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"model: {file} is no tokenizer's: {said(error)}") from error
    check_added(file, "added_tokens", stated.added_tokens)
    growth = 1
    for path, part in parts_of("normalizer", stated.normalizer):
        growth *= growth_of(file, path, part)
        if growth > MOST_GROWTH:
            made = f"makes more than {MOST_GROWTH} characters of one, together with what comes before it"
            raise problem_in(file, path, f"{made}; take it out")
    check_affixes(file, stated)
    check_around(file, stated.post_processor)
    check_decoder(file, stated)


def check_added(file: Path, field: str, value: Any) -> None:
    """Raise ConfigError for too many added tokens, or one that is too long."""
    if not isinstance(value, list | dict):
        return
    if len(value) > MOST_ADDED:
        raise problem_in(file, field, f"holds {len(value)} tokens; there may be at most {MOST_ADDED}")
    texts = [*value, *(value.values() if isinstance(value, dict) else ())]
    for text in texts:
        content = text.get("content") if isinstance(text, dict) else text
        if isinstance(content, str) and len(content) > MOST_PER_TOKEN:
            raise problem_in(file, field, f"holds a token of {len(content)} characters; it may have {MOST_PER_TOKEN}")


def parts_of(path: str, value: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """All parts of a normalizer, pre-tokenizer, post-processor or decoder with their paths; sequences are flattened."""
    left = [(path, value)]
    while left:
        where, part = left.pop(0)
        if not isinstance(part, dict):
            continue
        yield where, part
        inner = [(f"{where}.{key}", some) for key, some in part.items() if isinstance(some, list)]
        # Inner parts come next, in their order: growth multiplies along the order in which parts apply.
        left = [(f"{name}[{i}]", one) for name, some in inner for i, one in enumerate(some)] + left


def growth_of(file: Path, path: str, part: dict[str, Any]) -> int:
    """The most characters that a part makes of one."""
    if part.get("type") == "Precompiled":
        return longest_in(file, path, part.get("precompiled_charsmap"))
    if part.get("type") != "Replace":
        return 1
    content, pattern = str(part.get("content") or ""), part.get("pattern")
    text = pattern.get("String") if isinstance(pattern, dict) else pattern
    if isinstance(text, str) and text:
        return max(1, -(-len(content) // len(text)))
    return 1 + len(content)  # a regular expression may match between two characters


def longest_in(file: Path, path: str, charsmap: Any) -> int:
    """Length of the longest text in SentencePiece's table: 4 bytes of the index's size, the index, zero-ended texts."""
    try:
        table = base64.b64decode(charsmap or "")
    except (TypeError, ValueError, binascii.Error) as error:
        raise problem_in(file, f"{path}.precompiled_charsmap", f"is not base64: {said(error)}") from error
    texts = table[4 + int.from_bytes(table[:4], "little") :]
    return max((len(text) for text in texts.split(b"\0")), default=1) or 1


def check_affixes(file: Path, stated: Stated) -> None:
    """Raise ConfigError for an affix that is too long."""
    model = {name: getattr(stated.model, name) for name in stated.model.__struct_fields__ if name != "vocab"}
    roots = {"normalizer": stated.normalizer, "pre_tokenizer": stated.pre_tokenizer, "decoder": stated.decoder}
    for root, value in {**roots, "model": model}.items():
        for path, part in parts_of(root, value):
            for name in AFFIXES & part.keys():
                if isinstance(part[name], str) and len(part[name]) > MOST_AFFIX:
                    problem = f"has {len(part[name])} characters; it may have {MOST_AFFIX}"
                    raise problem_in(file, f"{path}.{name}", problem)


def check_around(file: Path, post_processor: Any) -> None:
    """Raise ConfigError for too many special tokens around a text: a template's pieces, each with its ids."""
    around = 0
    for path, part in parts_of("post_processor", post_processor):
        special = part.get("special_tokens")
        listed = special.values() if isinstance(special, dict) else ()
        ids = max((len(one.get("ids") or ()) for one in listed if isinstance(one, dict)), default=1)
        pieces = [part.get(side) for side in ("single", "pair")]
        around += max(1, ids) * max((len(one) for one in pieces if isinstance(one, list)), default=0)
        if around > MOST_AROUND:
            raise problem_in(file, path, f"puts {around} tokens around a text; there may be at most {MOST_AROUND}")


def check_decoder(file: Path, stated: Stated) -> None:
    """Raise ConfigError if a token may decode to too long a text: the longest token times each part's growth."""
    vocab = stated.model.vocab
    listed = vocab if isinstance(vocab, list) else list(vocab or {}) if isinstance(vocab, dict) else []
    pieces = [one[0] if isinstance(one, list) and one else one for one in listed]
    longest = max((len(piece) for piece in pieces if isinstance(piece, str)), default=1)
    if longest > MOST_PER_TOKEN:
        raise problem_in(file, "model.vocab", f"holds a token of {longest} characters; it may have {MOST_PER_TOKEN}")
    for path, part in parts_of("decoder", stated.decoder):
        longest *= growth_of(file, path, part)
        if longest > MOST_PER_TOKEN:
            made = f"makes more than {MOST_PER_TOKEN} characters of a token, together with what comes before it"
            raise problem_in(file, path, f"{made} ({shown(part, 80)}); take it out")


# ------------------------------------------------------------------------------------------------------ plain tokenizer
# The tokenizer of a folder that was made from a GGUF file, read without transformers.

TEMPLATE_FILE: Final = "chat_template.jinja"
DEFAULT: Final = "default"
"""The name of the template that counts where none is asked for."""
WITH_TOOLS: Final = "tool_use"
"""The name of the template for conversations with tools."""


class PlainTokenizer:
    """Takes the place of one of transformers' classes in ``Tokenizer``, under the names that it asks for."""

    def __init__(self, folder: Path) -> None:
        self.backend_tokenizer: Any = Tokenizer.from_file(str(folder / TOKENIZER_FILE))
        self.init_kwargs = read_json(folder / TOKENIZER_CONFIG_FILE)
        self.chat_template = templates_in(folder)
        """The chat template, or several by their names."""
        self.bos_token: str | None = self.init_kwargs.get("bos_token")
        eos: str | None = self.init_kwargs.get("eos_token")
        self.eos_token_id: int | None = None if eos is None else self.backend_tokenizer.token_to_id(eos)
        self.special_tokens_map: dict[str, str] = {
            name: token for name, token in self.init_kwargs.items() if name.endswith("_token") and token is not None
        }

    def __len__(self) -> int:
        return int(self.backend_tokenizer.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str, add_special_tokens: bool = True, verbose: bool = False) -> list[int]:
        return list(self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool, clean_up_tokenization_spaces: bool = False) -> str:
        return str(self.backend_tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))

    def get_chat_template(self, chat_template: str | None = None, tools: Any = None) -> str:
        """The template that is given, in full or by its name, else the file's. Raises ValueError without a default."""
        named = self.chat_template if isinstance(self.chat_template, dict) else {DEFAULT: self.chat_template}
        if chat_template is not None:
            return named.get(chat_template) or chat_template
        for name in (WITH_TOOLS,) * (tools is not None) + (DEFAULT,):
            if (found := named.get(name)) is not None:
                return found
        raise ValueError(f"none of the checkpoint's templates ({', '.join(sorted(named))}) is the default: give one")


def templates_in(folder: Path) -> str | dict[str, str] | None:
    """The folder's chat template, several by name, or None."""
    main = folder / TEMPLATE_FILE
    found = {DEFAULT: main.read_text(encoding="utf-8")} if main.is_file() else {}
    for file in sorted((folder / MORE_TEMPLATES).glob("*.jinja")):
        found[file.stem] = file.read_text(encoding="utf-8")
    return found.get(DEFAULT) if found.keys() <= {DEFAULT} else found
