"""GGUF files whose tokenizer is what matters: ``write_file``, and texts in which tokenizers differ."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

import gguf
import numpy as np
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

from tests.gguf_files import finish

WIDTH: Final = 32
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
SPACE: Final = "\u2581"
PREFIX: Final = "tokenizer.ggml."

TEXTS: Final = (
    "Hello, world! It's 2024; we've seen 1,234,567 things & they'll cost $9.99.",
    "\n\n1. a\n2. b\n\n   - nested\t\ttabs  \r\n\r\nend  ",
    "I'M SURE they'RE right, DON'T you'd 'S 'tis l'été aujourd'hui",
    "def f(x):\n    return x**2 + 0x1F  # comment\n\n\nclass A_b:\n\tpass\n",
    "camelCaseWords HTTPServer XMLHttpRequest iPhone éCole ÉCOLE Straße ǅungla",
    "日本語のテキスト。漢字とかな、カタカナ！？ 中文也有：“引号”，数字１２３和④。",
    "한국어 텍스트입니다. ㄱㄴㄷ 조선말 123개",
    "Привет, мир! Ελληνικά κείμενα. עברית 123 العربية ١٢٣ فارسی می\u200cخواهم",
    "हिन्दी में पाठ है। ภาษาไทย ไม่มีช่องว่าง မြန်မာ ខ្មែរ ລາວ தமிழ்",
    "emoji 😀👍🏽👨\u200d👩\u200d👧 ❤️ flags 🇩🇪🇯🇵 symbols ©®™ ← → ∑∫ ≠",
    "  leading spaces     and      many          inside       ",
    "\u00a0nbsp\u3000ideographic\u2003em\u2028line\u2029para\u200bzero\ufeffbom\u0085nel",
    "1 12 123 1234 12345 123456 1234567 12345678 3.14159 1e10 ½ Ⅷ ²",
    "a1b22c333d4444 x_1 v2.0.1 7up 4x4 B2B 2nd 1st.   12   345",
    '<html><body class="x">&nbsp;</body></html> {"key": [1, 2, {"a": null}]}',
    "http://example.org/path?q=1&r=%20#frag user@mail.com C:\\dir\\file.txt /usr/bin",
    "tabs\tand\nnewlines\r\nmixed \n \n\n  \t x\n\t\ty \r z\x0b\x0cw",
    "Tiếng Việt có dấu; combining: cafe\u0301 n\u0303 a\u0308\u0304 \u0301alone",
    "price: 5€ £3 ¥100 $1,000.00 | a|b||c ~x~ `code` ^caret^ x<=y>=z == != ++ -- ...  …",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𐍈 𠀀𠀁 \U0001f9ff ﷺ ﬁ ǆ ſ K Å '\u017f 'K <sentinel:12> IMGIMGABZ \ua000\ue000\u0378",
)
"""Texts with scripts, spaces, digits, emoji, code and contractions."""
WHOLE: Final = (" Việt", " right", " many", "日本語", "HTTP")
"""Words that are tokens although no merges make them."""


class Words(NamedTuple):
    """A vocabulary: tokens by id, their types, and merges or scores."""

    tokens: list[str]
    kinds: list[int]
    merges: list[str]
    scores: list[float]


@cache
def byte_level_words() -> Words:
    """Learned from ``TEXTS`` without cutting them into words, so that every cut of a pre-tokenizer shows."""
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = letters
    trainer = trainers.BpeTrainer(
        vocab_size=4000,
        initial_alphabet=sorted(letters.alphabet()),
        show_progress=False,
        min_frequency=2,
        max_token_length=12,
    )
    trained.train_from_iterator(TEXTS * 3, trainer)
    tokens, merges = learned(trained)
    whole = [letters.pre_tokenize_str(word)[0][0] for word in WHOLE]
    tokens += [word for word in whole if word not in tokens]
    return Words([*tokens, "<s>", "</s>"], [NORMAL] * len(tokens) + [CONTROL] * 2, merges, [])


@cache
def sentencepiece_words() -> Words:
    """Learned from ``TEXTS``, with the tokens that llama 2's kind has beside."""
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", SPACE)
    trainer = trainers.BpeTrainer(vocab_size=3000, show_progress=False, min_frequency=2, max_token_length=8)
    trained.train_from_iterator([*(f" {text}" for text in TEXTS * 3), *(" " * n + "x" for n in range(20))], trainer)
    found, _ = learned(trained)
    words = [word for word in found if len(word) > 1] + [word for word in found if len(word) == 1]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    more = {"[INST]": USER_DEFINED, "[/INST]": USER_DEFINED, "<|im_end|>": CONTROL, "  user  ": USER_DEFINED}
    kinds = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(words), *more.values()]
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(words))] + [-1000.0] * len(more)
    return Words([*tokens, *more], kinds, [], scores)


def learned(trained: Tokenizer) -> tuple[list[str], list[str]]:
    """The tokens by id and the merges of a trained tokenizer."""
    model = json.loads(trained.to_str())["model"]
    return sorted(model["vocab"], key=model["vocab"].get), [" ".join(pair) for pair in model["merges"]]


def write_file(
    path: Path, words: Words, *, model: str = "gpt2", pre: str | None = None, entries: Mapping[str, Any] | None = None
) -> Path:
    """A llama of one layer of zeros with this tokenizer. BOS and EOS are the vocabulary's unless ``entries`` say."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_type("model")
    describe(writer)
    writer.add_tokenizer_model(model)
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(words.tokens)
    writer.add_token_types(words.kinds)
    if words.scores:
        writer.add_token_scores(words.scores)
    else:
        writer.add_token_merges(words.merges)
    ids = {f"{PREFIX}{role}_token_id": words.tokens.index(one) for role, one in (("bos", "<s>"), ("eos", "</s>"))}
    for key, value in (ids | dict(entries or {})).items():
        add_entry(writer, key, value)
    for name, shape in shapes(len(words.tokens)).items():
        writer.add_tensor(name, np.zeros(shape, np.float32))
    finish(writer)
    return path


def add_entry(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """``None`` leaves the entry out."""
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    if value is not None:
        add[type(value)](key, value)


def describe(writer: gguf.GGUFWriter) -> None:
    writer.add_block_count(1)
    writer.add_context_length(512)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(WIDTH)
    writer.add_head_count(1)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(WIDTH)


def shapes(rows: int) -> dict[str, Sequence[int]]:
    square, line = (WIDTH, WIDTH), (WIDTH,)
    found: dict[str, Sequence[int]] = {
        "token_embd.weight": (rows, WIDTH),
        "output.weight": (rows, WIDTH),
        "output_norm.weight": line,
    }
    matrices = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    found |= {f"blk.0.{name}.weight": square for name in matrices}
    return found | {f"blk.0.{name}.weight": line for name in ("attn_norm", "ffn_norm")}
