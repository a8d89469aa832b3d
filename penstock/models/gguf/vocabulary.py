"""The vocabulary of a GGUF file as llama.cpp reads it: tokens, their types, and those that end a text.

llama.cpp (src/llama-vocab.cpp) takes the file's entries, fills in defaults for the kind of tokenizer, and corrects the
types of tokens that it knows by name: a file may not mark the token that ends its model's turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from gguf import TokenType

from penstock.files import printable, problem_in, shown
from penstock.models.gguf.arrays import numbers, texts
from penstock.models.gguf.header import Header
from penstock.models.gguf.pretokenizers import PRE_TOKENIZERS, PreTokenizer

PREFIX: Final = "tokenizer.ggml."
MODEL: Final = f"{PREFIX}model"
PRE: Final = f"{PREFIX}pre"
TOKENS: Final = f"{PREFIX}tokens"
TYPES: Final = f"{PREFIX}token_type"
SCORES: Final = f"{PREFIX}scores"
MERGES: Final = f"{PREFIX}merges"
BYTE_LEVEL: Final = "gpt2"
SENTENCEPIECE: Final = "llama"
KINDS: Final = (BYTE_LEVEL, SENTENCEPIECE)
"""Supported values of ``tokenizer.ggml.model``."""
REFUSED: Final = {
    "bert": "WordPiece, which encoders have",
    "t5": "a unigram model, which encoders with a decoder have",
    "rwkv": "RWKV's own, for models that carry a state",
    "plamo2": "PLaMo's own",
    "gemma4": "Gemma 4's own",
    "hybriddna": "for DNA",
    "whitespace": "for single words, which encoders have",
    "no_vocab": "no vocabulary",
    "none": "no vocabulary",
    "test": "a stand-in for tests",
}
REMEDY: Final = "give the checkpoint that the file was made of instead"
UNSTATED_PRE: Final = "default"

DEFAULT_IDS: Final = {
    BYTE_LEVEL: {"bos": 11, "eos": 11},
    SENTENCEPIECE: {"bos": 1, "eos": 2, "unknown": 0},
}
"""llama.cpp's ids where the file has none; an id beyond the vocabulary counts as none."""
ROLES: Final = (
    *("bos", "eos", "eot", "eom", "unknown", "seperator", "padding", "mask"),
    *("fim_pre", "fim_suf", "fim_mid", "fim_pad", "fim_rep", "fim_sep"),
)
"""Roles of tokens; the entry is ``tokenizer.ggml.ROLE_token_id``, spelt as in files."""
OLDER_ROLES: Final = {"prefix": "fim_pre", "suffix": "fim_suf", "middle": "fim_mid"}
"""Former name of a role in files -> the role."""
ENDING_ROLES: Final = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
ENDING: Final = frozenset(
    {
        *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>"),
        *("<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>", "<eos>"),
        *("<end_of_utterance>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~["),
    }
)
"""Tokens that end a text in every vocabulary that has them, whatever their type is."""
FIM_NAMES: Final = {
    "fim_pre": (
        *("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>"),
        *("<PRE>", "▁<PRE>", "<|code_prefix|>", "<|prefix|>"),
    ),
    "fim_suf": (
        *("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>"),
        *("<SUF>", "▁<SUF>", "<|code_suffix|>", "<|suffix|>"),
    ),
    "fim_mid": (
        *("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>"),
        *("<MID>", "▁<MID>", "<|code_middle|>", "<|middle|>"),
    ),
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
"""Role -> names of tokens for filling in the middle, used where the file gives no id for the role."""
SHOWN: Final = frozenset({"<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"})
"""gpt-oss's marks within an answer, which are text like any other."""
MESSAGE_END: Final = "<|end|>"
ANSWER_ENDS: Final = (("<|return|>", ("<|call|>", "<|calls|>")), ("<|flush|>", ("<|call|>", "<|calls|>")))
"""If a vocabulary has the first and one of the second, ``<|end|>`` ends a message, not the answer (gpt-oss, Solar
Open)."""
CLOSING_TAG: Final = "</s>"
CLOSING_IS_TEXT: Final = frozenset({"<|tool_response>", "<|plamo:eos|>"})
"""If a vocabulary has one of these, ``</s>`` is an ordinary token."""


@dataclass(frozen=True)
class Vocabulary:
    """The tokens by id. ``kinds`` are GGUF's token types with llama.cpp's corrections."""

    model: str
    pre: PreTokenizer
    tokens: Sequence[str]
    kinds: Sequence[int]
    ids: dict[str, int]
    """Role (``ROLES``) -> the file's id, or llama.cpp's default."""
    ends: tuple[int, ...]
    """Tokens that end a text."""
    add_bos: bool
    add_eos: bool
    add_space_prefix: bool
    """Whether SentencePiece puts a space before a text, and behind each special token."""
    numbers: dict[str, int] = field(repr=False)
    """Token -> id."""

    def special(self) -> list[int]:
        """Ids of the tokens that are found in a text before anything else."""
        found = (TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.UNKNOWN)
        return [number for number, kind in enumerate(self.kinds) if kind in found]

    def is_hidden(self, number: int) -> bool:
        """Whether a user's text never becomes this token: true for all special tokens but user-defined ones."""
        return self.kinds[number] in (TokenType.CONTROL, TokenType.UNKNOWN)


def vocabulary_of(header: Header) -> Vocabulary:
    """Read the vocabulary.

    Raises ConfigError for unsupported tokenizers, and for entries that contradict each other.
    """
    model, pre = kind_of(header)
    tokens = tokens_of(header)
    known = {token: number for number, token in enumerate(tokens)}
    if len(known) < len(tokens):
        twice = next(number for number, token in enumerate(tokens) if known[token] != number)
        raise problem_in(header.path, f"{TOKENS}[{twice}]", f"is {shown(tokens[twice])}, and so is another token")
    stated = stated_ids(header, len(tokens))
    defaults = {role: one for role, one in DEFAULT_IDS[model].items() if one < len(tokens)}
    if not pre.has_bos:
        defaults.pop("bos", None)
    ids = {**defaults, **stated}
    kinds = kinds_of(header, tokens)
    ends = mark(kinds, tokens, known, ids, stated)
    is_sentencepiece = model == SENTENCEPIECE
    found = Vocabulary(
        model,
        pre,
        tokens,
        kinds,
        ids,
        tuple(sorted(ends)),
        flag(header, "add_bos_token", pre.add_bos or is_sentencepiece),
        flag(header, "add_eos_token", False),
        is_sentencepiece and flag(header, "add_space_prefix", True),
        known,
    )
    check_added(header, found)
    return found


def kind_of(header: Header) -> tuple[str, PreTokenizer]:
    """The kind of tokenizer, and its pre-tokenizer. Raises ConfigError, with the name, for unsupported ones."""
    model = header.value(MODEL)
    if model not in KINDS:
        why = f", {REFUSED[model]}" if isinstance(model, str) and model in REFUSED else ""
        raise problem_in(header.path, MODEL, f"is {shown(model)}{why}; {' and '.join(KINDS)} can be read: {REMEDY}")
    if model == SENTENCEPIECE:
        return model, PreTokenizer(())
    named = header.value(PRE, UNSTATED_PRE)
    if not isinstance(named, str) or named not in PRE_TOKENIZERS:
        raise problem_in(header.path, PRE, f"is {shown(named)}, which is not known here: {REMEDY}")
    return model, PRE_TOKENIZERS[named]


def tokens_of(header: Header) -> list[str]:
    return [token or f"[EMPTY_{number}]" for number, token in enumerate(texts(header, TOKENS))]


def kinds_of(header: Header, tokens: Sequence[str]) -> list[int]:
    stated = numbers(header, TYPES)
    if stated is None:
        return [int(TokenType.NORMAL)] * len(tokens)
    if stated.dtype != np.int32 or len(stated) < len(tokens):
        raise problem_in(
            header.path, TYPES, f"is {len(stated)} of {stated.dtype}; it has to be an int32 for each of {len(tokens)}"
        )
    found: list[int] = stated[: len(tokens)].tolist()
    return found


def stated_ids(header: Header, count: int) -> dict[str, int]:
    """Role -> id, as far as the file states them. Raises ConfigError for an id beyond its vocabulary."""
    found = {}
    for named in (*OLDER_ROLES, *ROLES):
        key = f"{PREFIX}{named}_token_id"
        if key not in header.entries:
            continue
        value = header.value(key)
        if type(value) is not int or not 0 <= value < count:
            raise problem_in(
                header.path,
                key,
                f"is {shown(value)}; the vocabulary has {count} tokens: set it right or take it out "
                "(gguf_set_metadata.py of the gguf package)",
            )
        found[OLDER_ROLES.get(named, named)] = value
    return found


def flag(header: Header, name: str, default: bool) -> bool:
    key = f"{PREFIX}{name}"
    value = header.value(key, default)
    if type(value) is not bool:
        raise problem_in(header.path, key, f"is {shown(value)}; it has to be true or false")
    return value


def mark(
    kinds: list[int], tokens: Sequence[str], known: dict[str, int], ids: dict[str, int], stated: dict[str, int]
) -> set[int]:
    """Correct ``kinds`` in place. Returns the tokens that end a text: those with such a role or such a name."""
    named = {known[name] for name in ENDING if name in known}
    filling = {
        role: {known[name] for name in names if name in known}
        for role, names in FIM_NAMES.items()
        if role not in stated
    }
    for number in named.union(*filling.values()):
        kinds[number] = TokenType.CONTROL
    for name in SHOWN & known.keys():
        kinds[known[name]] = TokenType.USER_DEFINED
    ends = named | {ids[role] for role in ENDING_ROLES if role in ids}
    ends |= {number for role in ENDING_ROLES for number in filling.get(role, ())}
    for name, kind in exceptions({tokens[number] for number in ends}):
        kinds[known[name]] = kind
        ends.discard(known[name])
    return ends


def exceptions(ending: set[str]) -> list[tuple[str, int]]:
    """The tokens among ``ending`` that do not end a text after all, with the types that they have instead."""
    found: list[tuple[str, int]] = []
    if MESSAGE_END in ending and any(one in ending and ending & set(others) for one, others in ANSWER_ENDS):
        found.append((MESSAGE_END, TokenType.USER_DEFINED))
    if CLOSING_TAG in ending and ending & CLOSING_IS_TEXT:
        found.append((CLOSING_TAG, TokenType.NORMAL))
    return found


def check_added(header: Header, found: Vocabulary) -> None:
    """Raise ConfigError if texts shall begin or end with a token that the file does not have."""
    for role, adds in (("bos", found.add_bos), ("eos", found.add_eos)):
        if adds and role not in found.ids:
            raise problem_in(
                header.path, f"{PREFIX}add_{role}_token", f"is true, and there is no {PREFIX}{role}_token_id: add it"
            )


def described(vocabulary: Vocabulary, number: int) -> str:
    """A token as error messages show it."""
    return f"{number} ({printable(vocabulary.tokens[number])})"
