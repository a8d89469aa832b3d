"""How byte-level texts are cut into words before merging: a table of every supported ``tokenizer.ggml.pre``.

A pre-tokenizer is a list of patterns. The first one cuts the text into its matches and the stretches between them; each
later one cuts those pieces again, and sees nothing beyond a piece. The patterns are those of llama.cpp's
src/llama-vocab.cpp in the syntax of Oniguruma, which ``tokenizers`` uses. llama.cpp's own machine differs from usual
regular expressions in three ways, which the patterns here spell out:

- upper and lower case are distinguished for ASCII letters only, so ``\\p{Lu}`` means any letter there;
- a range of code points never matches white space outside of ASCII;
- digits are grouped in threes together with the text before them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


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
