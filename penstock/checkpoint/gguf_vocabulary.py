"""A GGUF file's vocabulary: its tokens, pre-tokenizer, ends of texts, and sampling parameters."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from gguf import TokenType

from penstock.checkpoint.gguf_header import Header, numbers, texts
from penstock.core import RequestError, SamplingParams
from penstock.files import printable, problem_in, shown

# ------------------------------------------------------------------------------------------------------------- sampling
# The sampling parameters that a GGUF file recommends, as fields of generation_config.json.

log = logging.getLogger(__name__)

SAMPLING_PREFIX: Final = "general.sampling."
FIELDS: Final = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
"""Entry -> the parameter that it recommends a value for."""
PENALISED: Final = "penalty_last_n"
"""The number of latest tokens that llama.cpp penalises; -1 for all, as here, and 0 for none."""
OFF: Final[dict[str, tuple[Any, ...]]] = {
    PENALISED: (-1, 0),
    "penalty_repeat": (1.0,),
    "mirostat": (0,),
    "xtc_probability": (0.0,),
}
"""Entry -> values that are followed without a parameter; the first one is llama.cpp's default, or does the same."""
DEPENDENT: Final = {
    PENALISED: "penalty_repeat",
    "mirostat_tau": "mirostat",
    "mirostat_eta": "mirostat",
    "xtc_threshold": "xtc_probability",
}
"""Entry -> the one that makes it count; where that is off, it says nothing."""


def sampling(header: Header) -> dict[str, Any]:
    """The recommended parameters, rounded to six places: the file has float32.

    Recommendations that no parameter here follows are named in one line of the log. Raises ConfigError for values
    that no parameter may have.
    """
    stated = {key.removeprefix(SAMPLING_PREFIX): key for key in header.entries if key.startswith(SAMPLING_PREFIX)}
    found = {name: recommended(header, stated[one], name) for one, name in FIELDS.items() if one in stated}
    if header.value(f"{SAMPLING_PREFIX}{PENALISED}") == 0:
        found.pop("repetition_penalty", None)
    unread = [key for name, key in stated.items() if name not in FIELDS and not is_followed(header, name)]
    if unread:
        values = ", ".join(f"{key} {shown(header.value(key))}" for key in unread)
        log.warning(f"{header.path} recommends {values}, for which there is no sampling parameter here: not followed")
    return found


def recommended(header: Header, key: str, name: str) -> int | float:
    """The value of an entry for the parameter ``name``."""
    value = header.value(key)
    params: dict[str, Any] = {name: round(value, 6) if isinstance(value, float) else value}
    try:
        return getattr(SamplingParams(**params), name)  # type: ignore[no-any-return]
    except RequestError as error:
        raise problem_in(header.path, key, f"recommends what cannot be: {error}") from error


def is_followed(header: Header, name: str) -> bool:
    """Whether an entry without a parameter says nothing, or what is done anyway."""
    values = OFF.get(name, ())
    default = values[0] if values else None
    return header.value(f"{SAMPLING_PREFIX}{name}", default) in values or (
        name in DEPENDENT and is_followed(header, DEPENDENT[name])
    )


# -------------------------------------------------------------------------------------------------------- pretokenizers
# How byte-level texts are cut into words before merging: a table of every supported ``tokenizer.ggml.pre``.
#
# A pre-tokenizer is a list of patterns. The first one cuts the text into its matches and the stretches between them;
# each later one cuts those pieces again, and sees nothing beyond a piece. The patterns are those of llama.cpp's
# src/llama-vocab.cpp in the syntax of Oniguruma, which ``tokenizers`` uses. llama.cpp's own machine differs from usual
# regular expressions in three ways, which the patterns here spell out:
#
# - upper and lower case are distinguished for ASCII letters only, so ``\p{Lu}`` means any letter there;
# - a range of code points never matches white space outside of ASCII;
# - digits are grouped in threes together with the text before them.


def code_points(described: str) -> str:
    """A hexadecimal code point, or two with a dash between, as Oniguruma writes them."""
    return "-".join(rf"\x{{{one}}}" for one in described.split("-"))


CONTRACTION: Final = r"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]"
SPACES: Final = r"\s+(?!\S)|\s+"
NEWLINES: Final = r"\s*[\r\n]+"
SIGNS: Final = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
WORD: Final = r"[^\r\n\p{L}\p{N}]?\p{L}+"
DIGIT: Final = r"\p{N}"
DIGITS: Final = r"\p{N}+"
THREE_DIGITS: Final = r"\p{N}{1,3}"
ASCII_THREES: Final = "[0-9][0-9][0-9]"
GPT2: Final = rf"'s|'t|'re|'ve|'m|'ll|'d| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|{SPACES}"

CASED_WORD: Final = (
    r"[^\r\n\p{L}\p{N}]?[\p{L}&&[^a-z]]*[\p{L}&&[^A-Z]]+",
    r"[^\r\n\p{L}\p{N}]?[\p{L}&&[^a-z]]+[\p{L}&&[^A-Z]]*",
)
"""Capitals before small letters: a word that ends where the next one begins in camelCase."""
MARKED_WORD: Final = (
    r"[^\r\n\p{L}\p{N}]?[[\p{L}\p{M}]&&[^a-z]]*[[\p{L}\p{M}]&&[^A-Z]]+",
    r"[^\r\n\p{L}\p{N}]?[[\p{L}\p{M}]&&[^a-z]]+[[\p{L}\p{M}]&&[^A-Z]]*",
)
ANY_CASE_WORD: Final = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+"
SIGNS_AND_SLASH: Final = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"

PUNCTUATION_WORD: Final = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
DEEPSEEK: Final = rf"{PUNCTUATION_WORD}| ?[\p{{P}}\p{{S}}]+[\r\n]*|{NEWLINES}|{SPACES}"
SPARK: Final = rf"{PUNCTUATION_WORD}| ?[\p{{P}}\p{{S}}]+|[\r\n]|{SPACES}"
HAN_AND_KANA: Final = "[一-龥\u3040-\u309f\u30a0-\u30ff]+"
ASIAN: Final = (
    "[\u4e00-\u9fff\u3400-\u4dbf\u8c48-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0e7f"
    "\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+"
)
CJK_OF_DEEPSEEK: Final = r"[[一-龥ࠀ-一가-\x{D7FF}]&&[^\s]]+"
CASED_SCRIPTS: Final = (
    "41-5a 61-7a b5 c0-d6 d8-f6 f8-1ba 1bc-1bf 1c4-293 295-2af 370-373 376 377 37b-37d 37f 386 388-38a 38c "
    "38e-3a1 3a3-3f5 3f7-481 48a-52f 531-556 10a0-10c5 13a0-13f5 13f8-13fd 1c90-1cba 1cbd-1cbf 1d00-1d2b "
    "1d6b-1d77 1d79-1d9a 1e00-1f15 1f18-1f1d 1f20-1f45 1f48-1f4d 1f50-1f57 1f59 1f5b 1f5d 1f5f-1f7d 1f80-1fb4 "
    "1fb6-1fbc 1fbe 1fc2-1fc4 1fc6-1fcc 1fd0-1fd3 1fd6-1fdb 1fe0-1fec 1ff2-1ff4 1ff6-1ffc 2102 2107 210a-2113 "
    "2115 2119-211d 2124 2126 2128 212a-212d 212f-2134 2139 213c-213f 2145-2149 214e 2183 2184 2c00-2c7b "
    "2c7e-2ce4 2ceb-2cee 2cf2 2cf3 a640-a66d a680-a69b a722-a76f a771-a787 a78b-a78e ab70-abbf fb00-fb06 "
    "fb13-fb17 ff21-ff3a ff41-ff5a 10400-1044f 104b0-104d3 104d8-104fb 10c80-10cb2 10cc0-10cf2 118a0-118df "
    "1e900-1e943 "
)
"""Hexadecimal code points: the letters of scripts that have cases, as DeepSeek lists them."""
LATIN_GREEK_CYRILLIC: Final = rf"\s?[{''.join(code_points(one) for one in CASED_SCRIPTS.split())}]+"
SCRIPT_SIGNS: Final = r"\s?[!-/:-~！-／：-～‘-‟、-。]+"
YOUTU_SCRIPTS: Final = (
    "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-\u303f\ufe30-\ufe4f]+|[ㄅ-ㄯ]+|[一-龥\u3040-\u309f\u30a0-\u30ff]+"
)
BLOOM: Final = r" ?[^(\s|.,!?…。，、।۔،)]+"
SIGN_RUNS: Final = r"[\p{P}$+<=>\^~|]+"
SIGN_RUNS_OF_FALCON: Final = r"[\p{P}$+<=>\^~|`]+"
THREES_FROM_THE_RIGHT: Final = r"(?<!\P{N})\P{N}*\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"
"""Groups of three digits, counted from the number's end; the first one includes the text before the number."""
LINES: Final = r"[^\n]+|[\n]+"

HAN: Final = (
    r"\x{4E00}-\x{9FFF}\x{3400}-\x{4DBF}\x{20000}-\x{2A6DF}\x{2A700}-\x{2EBEF}\x{F900}-\x{FAFF}\x{2F800}-\x{2FA1F}"
)
KIMI: Final = (
    rf"[{HAN}]+|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}&&[^{HAN}]]+(?:{CONTRACTION})?|{THREE_DIGITS}|{SIGNS}|{NEWLINES}|{SPACES}"
)
FALLING_SPACES: Final = "|".join(
    rf"\s{{{count}}}(?!\S)" for count in ("512", "256", "128", "64", "32", "16", "8", "4", "1,2")
)


def words(*alternatives: str) -> str:
    """A pattern that begins with English contractions in any case and ends with white space."""
    return "|".join([f"(?:{CONTRACTION})", *alternatives, NEWLINES, SPACES])


def cased(word: tuple[str, str], end: str, digits: str) -> str:
    """A pattern of words that end where capitals begin, each followed by ``end``."""
    return "|".join([*(f"{one}{end}" for one in word), digits, SIGNS_AND_SLASH, NEWLINES, SPACES])


LLAMA3: Final = words(WORD, THREE_DIGITS, SIGNS)
QWEN2: Final = words(WORD, DIGIT, SIGNS)
ENDING: Final = f"(?:{CONTRACTION})?"


@dataclass(frozen=True)
class PreTokenizer:
    """How llama.cpp cuts texts for one value of ``tokenizer.ggml.pre``."""

    splits: tuple[str, ...]
    """Patterns that are applied in turn."""
    ignore_merges: bool = False
    """Whether a word that is a token becomes that token, without regard to merges."""
    add_bos: bool = False
    """Whether texts begin with BOS if the file has no ``tokenizer.ggml.add_bos_token``."""
    has_bos: bool = True
    """Whether there is a BOS if the file has no ``tokenizer.ggml.bos_token_id``."""


def of_names(names: str, *splits: str, **more: bool) -> dict[str, PreTokenizer]:
    """One pre-tokenizer under several names, which spaces separate."""
    return dict.fromkeys(names.split(), PreTokenizer(splits, **more))


PRE_TOKENIZERS: Final[dict[str, PreTokenizer]] = {
    **of_names("default", SIGN_RUNS, GPT2, DIGITS, ASCII_THREES),
    **of_names(
        "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
        LLAMA3,
        ignore_merges=True,
        add_bos=True,
    ),
    **of_names("dbrx smaug-bpe", LLAMA3),
    **of_names("chatglm-bpe", LLAMA3, has_bos=False),
    **of_names("glm4 glm5", LLAMA3, ignore_merges=True, has_bos=False),
    **of_names("minicpm5", THREE_DIGITS, words(WORD, DIGITS, SIGNS), ignore_merges=True),
    **of_names("deepseek-llm", r"[\r\n]", LATIN_GREEK_CYRILLIC, SCRIPT_SIGNS, r"(?<!\s)\s+\z", CJK_OF_DEEPSEEK, DIGITS),
    **of_names("deepseek-coder", r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", CJK_OF_DEEPSEEK, DIGIT),
    **of_names("deepseek-v3 hunyuan-dense hy_v4 joyai-llm", THREE_DIGITS, HAN_AND_KANA, DEEPSEEK),
    **of_names("spark2_5", THREE_DIGITS, HAN_AND_KANA, SPARK, DIGIT),
    **of_names(
        "youtu",
        YOUTU_SCRIPTS,
        "|".join([f"{ANY_CASE_WORD}{ENDING}", DIGIT, SIGNS_AND_SLASH, NEWLINES, SPACES]),
        ignore_merges=True,
    ),
    **of_names("falcon", SIGN_RUNS_OF_FALCON, GPT2, ASCII_THREES),
    **of_names("starcoder refact command-r smollm codeshell exaone minerva-7b mellum2", DIGIT, GPT2),
    **of_names(
        "gpt-2 phi-2 jina-es jina-de gigachat jina-v2-es jina-v2-de a.x-4.0 mellum modern-bert jina-v1-en jina-v2-code "
        "roberta-bpe mpt olmo jais trillion granite-docling exaone4",
        GPT2,
    ),
    **of_names("jais-2", "|".join([f"(?:{CONTRACTION})", WORD, THREE_DIGITS, SIGNS, NEWLINES, FALLING_SPACES, r"\s"])),
    **of_names("qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2", QWEN2),
    **of_names("qwen35", words(ANY_CASE_WORD, DIGIT, r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*")),
    **of_names("poro-chat bloom gpt3-finnish", BLOOM),
    **of_names("viking", BLOOM, DIGIT),
    **of_names("tekken", cased(CASED_WORD, "", DIGIT), ignore_merges=True, add_bos=True),
    **of_names("gpt-4o llama4 kanana2 talkie minimax-m2", cased(CASED_WORD, ENDING, THREE_DIGITS)),
    **of_names("granite-embed-multi-97m", cased(MARKED_WORD, ENDING, THREE_DIGITS), ignore_merges=True),
    **of_names(
        "tiny_aya cohere2moe",
        THREES_FROM_THE_RIGHT,
        "|".join([f"{ANY_CASE_WORD}{ENDING}", THREE_DIGITS, SIGNS_AND_SLASH, NEWLINES, SPACES]),
    ),
    **of_names(
        "chameleon",
        "<sentinel:[0-9]+>",
        "(?:IMGIMG)(?:[A-I]){1,4}Z",
        r"[\t\n]|    |  ",
        DIGIT,
        r"[\p{P}!-/:-@\[-`{-~]",
        GPT2,
        add_bos=True,
    ),
    **of_names("superbpe", DIGITS, "(?=([0-9]{3})+(?![0-9]))"),
    **of_names(
        "bailingmoe bailingmoe2 llada-moe",
        rf"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|{WORD}|{DIGIT}|{SIGNS}|\s*[\r\n]|{SPACES}",
    ),
    **of_names("seed-coder", words(WORD, DIGIT, r" ?[^\s\p{L}\p{N}\r\n]+")),
    **of_names("ufakzeka", f"{WORD}|{DIGIT}|{SIGNS}|{NEWLINES}|{SPACES}"),
    **of_names("kimi-k2", KIMI),
    **of_names("k2-horizon", words(r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}\x{200C}\x{200D}]+", THREE_DIGITS, SIGNS)),
    **of_names("afmoe", THREES_FROM_THE_RIGHT, ASIAN, DEEPSEEK),
    **of_names("laguna", LINES, QWEN2),
    **of_names(
        "exaone-moe",
        rf"(?:{CONTRACTION})|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|{DIGIT}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]?|\s*[\r\n]|{SPACES}",
    ),
}
"""Pre-tokenizers by name. Names that share one are listed together."""

UNREADABLE: Final = frozenset({"whitespace", "gemma4", "granite-embed-multi-311m", "mmbert", "sarvam-moe"})
"""Further names that llama.cpp knows: of tokenizers that do not work on bytes, for models that are not run here."""


# ----------------------------------------------------------------------------------------------------------- vocabulary
# The vocabulary of a GGUF file as llama.cpp reads it: tokens, their types, and those that end a text.
#
# llama.cpp (src/llama-vocab.cpp) takes the file's entries, fills in defaults for the kind of tokenizer, and corrects
# the types of tokens that it knows by name: a file may not mark the token that ends its model's turns.

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
ENDING_TOKENS: Final = frozenset(
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
    """The tokens by id. Empty ones get a name: tokens are keys, and have to differ."""
    return [token or f"[EMPTY_{number}]" for number, token in enumerate(texts(header, TOKENS))]


def kinds_of(header: Header, tokens: Sequence[str]) -> list[int]:
    """The type of each token; all are normal where the file states none."""
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
    """An entry that is true or false; raises ConfigError for anything else."""
    key = f"{PREFIX}{name}"
    value = header.value(key, default)
    if type(value) is not bool:
        raise problem_in(header.path, key, f"is {shown(value)}; it has to be true or false")
    return value


def mark(
    kinds: list[int], tokens: Sequence[str], known: dict[str, int], ids: dict[str, int], stated: dict[str, int]
) -> set[int]:
    """Correct ``kinds`` in place. Returns the tokens that end a text: those with such a role or such a name."""
    named = {known[name] for name in ENDING_TOKENS if name in known}
    filling = {
        role: {known[name] for name in names if name in known}
        for role, names in FIM_NAMES.items()
        if role not in stated
    }
    for number in named.union(*filling.values()):
        kinds[number] = TokenType.CONTROL
    for name in SHOWN & known.keys():
        kinds[known[name]] = TokenType.USER_DEFINED
    # Roles count by their ids, stated or default; names for filling in only where the file states no id.
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
