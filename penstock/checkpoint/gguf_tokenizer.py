"""A GGUF file's tokenizer as a pipeline of ``tokenizers``, which gives the same ids as llama.cpp.

```
byte level    | special tokens | patterns of the pre-tokenizer in turn | bytes as letters | merges by rank
SentencePiece | special tokens | a space before, spaces as U+2581      | merges by score  | bytes for the rest
```
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np
from gguf import TokenType
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from penstock.checkpoint.gguf_header import Header, numbers, texts
from penstock.checkpoint.gguf_vocabulary import MERGES, REMEDY, SCORES, SENTENCEPIECE, TOKENS, Vocabulary, described
from penstock.files import TOKENIZER_CONFIG_FILE, problem_in, shown
from penstock.text.tokenizer import BEGINS_CHATS, TEMPLATE_TOKENS

SPACE: Final = "\u2581"
"""The character that SentencePiece uses for a space."""
TEMPLATE: Final = "tokenizer.chat_template"
TEMPLATE_FILE: Final = "chat_template.jinja"
MORE_TEMPLATES: Final = "additional_chat_templates"
"""llama.cpp's entry for a chat template, and the file and folder that transformers looks for."""
NAMED: Final = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
"""Role -> transformers' name for it."""
MOST_CUTS: Final = 1 << 25
"""Most ways to cut tokens in two, where merges have to be derived from them; 256,000 tokens have 16 million."""
MERGED: Final = (TokenType.NORMAL, TokenType.USER_DEFINED, TokenType.UNUSED)
"""Types of tokens that SentencePiece's pieces are merged into."""
STRIPPING: Final = ("phi-3", "phi3")
"""Parts of the names of models whose special tokens swallow the white space behind them."""
NOT_STRIPPING: Final = ("<unk>", "<s>", "<|endoftext|>")
"""Special tokens of these models that do not swallow it."""


def write_tokenizer(header: Header, vocabulary: Vocabulary, folder: Path) -> None:
    """Write tokenizer.json, its configuration and the chat templates. Raises ConfigError for what cannot be read."""
    built = pipeline(header, vocabulary)
    check_special(header, vocabulary, built)
    built.save(str(folder / "tokenizer.json"))
    named = {name: vocabulary.ids[role] for role, name in NAMED.items() if role in vocabulary.ids}
    special = {name for name, number in named.items() if vocabulary.is_hidden(number)}
    tokens = {name: vocabulary.tokens[number] for name, number in named.items()}
    table = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        BEGINS_CHATS: vocabulary.add_bos,
        TEMPLATE_TOKENS: tokens,
        **{name: tokens[name] for name in special},
    }
    (folder / TOKENIZER_CONFIG_FILE).write_text(json.dumps(table, indent=1))
    write_templates(header, folder)


def write_templates(header: Header, folder: Path) -> None:
    """Write the file's chat templates to where transformers looks for them."""
    if isinstance(template := header.value(TEMPLATE), str):
        (folder / TEMPLATE_FILE).write_text(template)
    more = {key.removeprefix(f"{TEMPLATE}."): key for key in header.entries if key.startswith(f"{TEMPLATE}.")}
    for name, key in more.items():
        if name.isidentifier() and isinstance(header.value(key), str):
            (folder / MORE_TEMPLATES).mkdir(exist_ok=True)
            (folder / MORE_TEMPLATES / f"{name}.jinja").write_text(header.value(key))


def pipeline(header: Header, vocabulary: Vocabulary) -> Tokenizer:
    """The file's tokenizer, with its special tokens and the tokens that begin and end a text."""
    make = sentencepiece if vocabulary.model == SENTENCEPIECE else byte_level
    built = make(header, vocabulary)
    built.add_tokens([added(header, vocabulary, number) for number in vocabulary.special()])
    bos, eos = (vocabulary.tokens[vocabulary.ids[role]] if role in vocabulary.ids else "" for role in ("bos", "eos"))
    parts = [*[f"{bos}:0"] * vocabulary.add_bos, "$A:0", *[f"{eos}:0"] * vocabulary.add_eos]
    if len(parts) > 1:
        ends = [(token, vocabulary.numbers[token]) for token in {bos, eos} if token]
        built.post_processor = processors.TemplateProcessing(single=parts, special_tokens=ends)
    return built


def added(header: Header, vocabulary: Vocabulary, number: int) -> AddedToken:
    """A special token, which is found in a text before anything else."""
    token = vocabulary.tokens[number]
    name = str(header.value("general.name", "")).lower()
    strips = any(one in name for one in STRIPPING) and token not in NOT_STRIPPING
    return AddedToken(token, rstrip=strips, normalized=False, special=vocabulary.is_hidden(number))


def check_special(header: Header, vocabulary: Vocabulary, built: Tokenizer) -> None:
    """Raise ConfigError unless every special token of the file is encoded as itself."""
    special = vocabulary.special()
    found = built.encode_batch([vocabulary.tokens[number] for number in special], add_special_tokens=False)
    for number, encoding in zip(special, found, strict=True):
        if encoding.ids != [number]:
            raise problem_in(
                header.path,
                TOKENS,
                f"holds the special token {described(vocabulary, number)}, which is read as {encoding.ids}: {REMEDY}",
            )


# ---------------------------------------------------------------------------------------------------------- byte level
# Tokenizers of GPT-2's kind: a text is cut by patterns, and merges are stored by rank.


def byte_level(header: Header, vocabulary: Vocabulary) -> Tokenizer:
    """A tokenizer of GPT-2's kind. Raises ConfigError for merges that make no token."""
    pre = vocabulary.pre
    model = models.BPE(vocab=vocabulary.numbers, merges=merges_of(header, vocabulary), ignore_merges=pre.ignore_merges)
    built = Tokenizer(model)
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.splits]
    built.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    built.decoder = decoders.ByteLevel()
    return built


def merges_of(header: Header, vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """The merges in their order; of two equal ones the first counts."""
    if MERGES not in header.entries:
        raise problem_in(header.path, MERGES, f"is missing, and a tokenizer of this kind has merges: {REMEDY}")
    found: dict[tuple[str, str], None] = {}
    for number, text in enumerate(texts(header, MERGES)):
        # Behind the first character: the left part has at least one, even if that is a space.
        cut = text.find(" ", 1)
        pair = (text[:cut], text[cut + 1 :])
        if cut < 0 or any(part not in vocabulary.numbers for part in (*pair, "".join(pair))):
            raise problem_in(
                header.path, f"{MERGES}[{number}]", f"is {shown(text)}, which makes no token of two: {REMEDY}"
            )
        found.setdefault(pair)
    return list(found)


# ------------------------------------------------------------------------------------------------------- SentencePiece
# Tokenizers of llama's kind: a text is not cut, and merges are derived from the tokens' scores.


def sentencepiece(header: Header, vocabulary: Vocabulary) -> Tokenizer:
    """A tokenizer of llama's kind: neighbours merge to the token with the highest score, the leftmost first."""
    unknown = vocabulary.ids.get("unknown")
    model = models.BPE(
        vocab=vocabulary.numbers,
        merges=scored_merges(header, vocabulary),
        unk_token=None if unknown is None else vocabulary.tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    built = Tokenizer(model)
    begin = [normalizers.Prepend(SPACE)] if vocabulary.add_space_prefix else []
    built.normalizer = normalizers.Sequence([*begin, normalizers.Replace(" ", SPACE)])
    end = [decoders.Strip(" ", 1, 0)] if vocabulary.add_space_prefix else []
    built.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *end])
    return built


def scored_merges(header: Header, vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """Every pair of tokens that makes a token, in llama.cpp's order of merging: the highest score first.

    Raises ConfigError where pairs cannot express that order: for equal scores, and for tokens with a letter that is no
    token.
    """
    scores = scores_of(header, vocabulary)
    merged = [number for number, kind in enumerate(vocabulary.kinds) if kind in MERGED]
    merged = [number for number in merged if len(vocabulary.tokens[number]) > 1]
    cuts = sum(len(vocabulary.tokens[number]) ** 2 for number in merged)
    if cuts > MOST_CUTS:
        raise problem_in(header.path, TOKENS, f"could be cut in {cuts} ways; without merges there may be {MOST_CUTS}")
    merged.sort(key=lambda number: -scores[number])
    pairs = [(number, pair) for number in merged for pair in cuts_of(vocabulary, number)]
    check_order(header, vocabulary, scores, [number for number, _ in pairs])
    check_letters(header, vocabulary, merged)
    return [pair for _, pair in pairs]


def cuts_of(vocabulary: Vocabulary, number: int) -> Iterator[tuple[str, str]]:
    """The pairs of tokens that a token can be cut into, the one with the longest left part first."""
    token, known = vocabulary.tokens[number], vocabulary.numbers
    for cut in range(len(token) - 1, 0, -1):
        if token[:cut] in known and token[cut:] in known:
            yield token[:cut], token[cut:]


def scores_of(header: Header, vocabulary: Vocabulary) -> list[float]:
    """The score of each token, float32. Raises ConfigError if there are too few, or one is not finite."""
    found = numbers(header, SCORES)
    if found is None or len(found) < len(vocabulary.tokens) or not np.isfinite(found.astype(np.float32)).all():
        held = "missing" if found is None else f"{len(found)} numbers"
        raise problem_in(
            header.path,
            SCORES,
            f"is {held}; this kind of tokenizer has a finite one for each of {len(vocabulary.tokens)} tokens: {REMEDY}",
        )
    scores: list[float] = found.astype(np.float32).tolist()
    return scores


def check_order(header: Header, vocabulary: Vocabulary, scores: Sequence[float], merged: Sequence[int]) -> None:
    """Raise ConfigError if two ordinary tokens that result from merges have the same score."""
    ordinary = [number for number in dict.fromkeys(merged) if vocabulary.kinds[number] == TokenType.NORMAL]
    for one, other in pairwise(ordinary):
        if scores[one] == scores[other]:
            both = " and ".join(described(vocabulary, number) for number in (one, other))
            raise problem_in(
                header.path, SCORES, f"is {scores[one]:g} for both {both}, so that their order is open: {REMEDY}"
            )


def check_letters(header: Header, vocabulary: Vocabulary, merged: Sequence[int]) -> None:
    """Raise ConfigError if an ordinary token contains a letter that is no token."""
    for number in merged:
        if vocabulary.kinds[number] == TokenType.NORMAL:
            for letter in vocabulary.tokens[number]:
                if letter not in vocabulary.numbers:
                    raise problem_in(
                        header.path,
                        TOKENS,
                        f"holds {described(vocabulary, number)}, and {shown(letter)} is no token of its own: {REMEDY}",
                    )
