"""Tokenizers of GGUF files beside llama.cpp's own: equal, or refused by the name of the entry."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.checkpoint.gguf import folder_of
from penstock.checkpoint.gguf_header import read_header
from penstock.checkpoint.gguf_vocabulary import (
    ENDING_TOKENS,
    FIM_NAMES,
    KINDS,
    OLDER_ROLES,
    PRE_TOKENIZERS,
    REFUSED,
    UNREADABLE,
)
from penstock.core import ConfigError
from penstock.text.chat import ChatFormat, chat_prompt
from penstock.text.tokenizer import Tokenizer, load_tokenizer
from tests.gguf_tokenizers import (
    CONTROL,
    NORMAL,
    PREFIX,
    TEXTS,
    UNUSED,
    USER_DEFINED,
    Words,
    byte_level_words,
    sentencepiece_words,
    write_file,
)
from tests.llama_cpp import needs_llama_cpp, vocabulary
from tests.real_model import smollm2

pytestmark = pytest.mark.usefixtures("cache")

LENIENT = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
PIECES = st.lists(st.sampled_from([text[i : i + 5] for text in TEXTS for i in range(0, len(text), 3)]), max_size=12)
FULLWIDTH = "<\uff5cend\u2581of\u2581sentence\uff5c>"


def opened(path: Path) -> Tokenizer:
    return load_tokenizer(folder_of(read_header(path)))


def small(**more: int) -> Words:
    """Bytes, one merge, BOS and EOS; ``more`` are tokens with their types."""
    words = byte_level_words()
    tokens = [*words.tokens[:256], "\u0120t", "<s>", "</s>", *more]
    return Words(tokens, [*[NORMAL] * 257, CONTROL, CONTROL, *more.values()], ["\u0120 t"], [])


def check_equal(path: Path, texts: list[str]) -> Tokenizer:
    """The ids of every text, with what the file adds and without, and the ends are llama.cpp's."""
    found = opened(path)
    with vocabulary(path) as judge:
        assert judge is not None
        for text in texts:
            for added in (True, False):
                wanted = judge.encode(text, add_special=added)
                assert found.encode(text, add_special_tokens=added) == wanted, text
        assert list(found.eos_token_ids) == judge.ends()
    return found


# ------------------------------------------------------------------------------------------------------ every tokenizer


@needs_llama_cpp
@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_every_pre_tokenizer_cuts_as_llama_cpp_does(tmp_path: Path, pre: str) -> None:
    check_equal(write_file(tmp_path / "x.gguf", byte_level_words(), pre=pre), list(TEXTS))


@needs_llama_cpp
@pytest.mark.parametrize("pre", sorted({one.splits: name for name, one in PRE_TOKENIZERS.items()}.values()))
@pytest.mark.parametrize("count", [25, pytest.param(60, marks=pytest.mark.whole)])
def test_every_pattern_cuts_any_text_as_llama_cpp_does(tmp_path: Path, pre: str, count: int) -> None:
    pieces, pick = [text[i : i + 4] for text in TEXTS for i in range(0, len(text), 2)], random.Random(pre)
    texts = ["".join(pick.choices(pieces, k=pick.randint(1, 12))) for _ in range(count)]
    check_equal(write_file(tmp_path / "x.gguf", byte_level_words(), pre=pre), texts)


@needs_llama_cpp
@pytest.mark.parametrize(
    "entries", [{}, {"add_space_prefix": False}, {"add_bos_token": False, "add_eos_token": True}], ids=str
)
def test_sentencepiece_is_llama_cpps(tmp_path: Path, entries: dict[str, bool]) -> None:
    stated = {f"{PREFIX}{name}": value for name, value in entries.items()}
    path = write_file(tmp_path / "x.gguf", sentencepiece_words(), model="llama", entries=stated)
    more = ["<s>[INST] Hello [/INST] the", "  user   the x", " the", "", "<s> a</s>b [INST]c"]
    found = check_equal(path, [*TEXTS, *more])

    @settings(max_examples=60, suppress_health_check=LENIENT)
    @given(pieces=PIECES, spaces=st.integers(0, 12))
    def any_text(pieces: list[str], spaces: int) -> None:
        with vocabulary(path) as judge:
            assert judge is not None
            text = (" " * spaces).join(pieces)
            assert found.encode(text) == judge.encode(text, add_special=True)

    any_text()


@needs_llama_cpp
def test_the_real_models_texts_are_llama_cpps() -> None:
    path = smollm2()
    found = check_equal(path, list(TEXTS))
    assert found.encode("\n\n1. a") == [1116, 33, 30, 253]
    assert found.encode("  1") == [256, 33]
    asked = [{"role": "user", "content": "Which is true?\n\n1. Rain is wet.\n2. Snow is hot.\n\n  3. Ice is cold."}]
    with vocabulary(path) as judge:
        assert judge is not None
        assert found.apply_chat_template(asked) == judge.encode(found.render(asked, True))


@needs_llama_cpp
@pytest.mark.parametrize("pre", [None, *sorted(UNREADABLE), "some-new-one"])
def test_a_pre_tokenizer_that_is_not_read_is_named(tmp_path: Path, pre: str | None) -> None:
    path = write_file(tmp_path / "x.gguf", byte_level_words(), pre=pre)
    if pre is None:
        check_equal(path, list(TEXTS))
        return
    with pytest.raises(ConfigError, match=rf'{PREFIX}pre is "{pre}", which is not known here: give the checkpoint'):
        opened(path)


@pytest.mark.parametrize("model", [*REFUSED, "some-new-one"])
def test_a_kind_of_tokenizer_that_is_not_read_is_named(tmp_path: Path, model: str) -> None:
    path = write_file(tmp_path / "x.gguf", byte_level_words(), model=model)
    with pytest.raises(ConfigError, match=rf'{PREFIX}model is "{model}".*gpt2 and llama can be read: give the check'):
        opened(path)


def test_no_kind_is_both_read_and_refused() -> None:
    assert not set(KINDS) & set(REFUSED)
    assert not set(PRE_TOKENIZERS) & UNREADABLE


# ------------------------------------------------------------------------------------------------------- special tokens


@needs_llama_cpp
def test_special_tokens_are_themselves_in_any_letters(tmp_path: Path) -> None:
    more = {
        FULLWIDTH: CONTROL,
        "<\uff5cUser\uff5c>": CONTROL,
        "你好": USER_DEFINED,
        "  ": USER_DEFINED,
        "<unused7>": UNUSED,
    }
    path = write_file(tmp_path / "x.gguf", small(**more), pre="qwen2")
    found = check_equal(path, [f"a{token}b  {token}" for token in more])
    for number, token in enumerate(more, 259):
        assert found.encode(token) == [number] or token == "<unused7>"
    assert len(found) == 259 + len(more)
    assert found.encode_literal(found.literal.hide(f"a {FULLWIDTH}", "text")) == [
        *found.encode("a "),
        *(byte for letter in FULLWIDTH for byte in found.encode(letter)),
    ]


@needs_llama_cpp
@pytest.mark.parametrize(
    "name", sorted({*ENDING_TOKENS, *(name for role in ("fim_pad", "fim_rep", "fim_sep") for name in FIM_NAMES[role])})
)
@pytest.mark.parametrize("kind", [CONTROL, NORMAL])
def test_a_text_ends_with_what_llama_cpp_ends_it(tmp_path: Path, name: str, kind: int) -> None:
    words = small() if name == "</s>" else small(**{name: kind})
    path = write_file(tmp_path / "x.gguf", words, pre="qwen2", entries={f"{PREFIX}eos_token_id": 12})
    found = check_equal(path, [f"a {name}b", "a"])
    assert {12, words.tokens.index(name)} <= set(found.eos_token_ids)


@needs_llama_cpp
@pytest.mark.parametrize(
    ("tokens", "goes_on"),
    [
        (("<|end|>", "<|return|>", "<|call|>", "<|channel|>", "<|message|>", "<|start|>"), "<|end|>"),
        (("<|end|>", "<|flush|>", "<|calls|>"), "<|end|>"),
        (("<|end|>", "<|return|>"), None),
        (("<|tool_response>", "<turn|>"), "</s>"),
    ],
)
def test_what_closes_a_message_does_not_end_an_answer(
    tmp_path: Path, tokens: tuple[str, ...], goes_on: str | None
) -> None:
    words = small(**dict.fromkeys(tokens, CONTROL))
    path = write_file(tmp_path / "x.gguf", words, pre="gpt-4o", entries={f"{PREFIX}eos_token_id": 260})
    found = check_equal(path, ["a".join(tokens) + "</s>"])
    ends = {words.tokens[number] for number in found.eos_token_ids}
    assert ends == {*tokens, "</s>"} - {goes_on, "<|channel|>", "<|message|>", "<|start|>"}


@needs_llama_cpp
@pytest.mark.parametrize(("pre", "begins"), [("llama-bpe", True), ("tekken", True), ("qwen2", False)])
def test_bos_is_there_by_default_where_llama_cpp_has_it(tmp_path: Path, pre: str, begins: bool) -> None:
    found = check_equal(write_file(tmp_path / "x.gguf", small(), pre=pre), ["a"])
    assert (found.encode("a")[0] == 257) is begins


@needs_llama_cpp
@pytest.mark.parametrize("stated", [{}, {"bos": None}, {"eos": None}, {"eot": 5, "eom": 7}], ids=str)
def test_ids_that_no_entry_names_are_llama_cpps_defaults(tmp_path: Path, stated: dict[str, int | None]) -> None:
    entries = {f"{PREFIX}{role}_token_id": value for role, value in stated.items()}
    check_equal(write_file(tmp_path / "x.gguf", small(), pre="llama-bpe", entries=entries), ["a <s>"])


@needs_llama_cpp
@pytest.mark.parametrize("role", [*OLDER_ROLES, *OLDER_ROLES.values()])
def test_a_token_for_filling_in_is_the_one_that_the_file_names(tmp_path: Path, role: str) -> None:
    """A token with a known name is one like any other where an entry, by its former name too, names another one."""
    name = FIM_NAMES[OLDER_ROLES.get(role, role)][4]
    for entries in ({}, {f"{PREFIX}{role}_token_id": 5}):
        path = write_file(tmp_path / f"{len(entries)}.gguf", small(**{name: NORMAL}), pre="qwen2", entries=entries)
        found = check_equal(path, [f"a{name}b"])
        assert (259 in found.encode(name)) is not bool(entries)


@needs_llama_cpp
def test_a_conversation_begins_with_bos_once(tmp_path: Path) -> None:
    for name, template in (
        ("with", "{{ bos_token }}{{ messages[0].content }}"),
        ("without", "{{ messages[0].content }}"),
    ):
        entries = {"tokenizer.chat_template": template}
        path = write_file(tmp_path / f"{name}.gguf", small(), pre="llama-bpe", entries=entries)
        found, asked = opened(path), [{"role": "user", "content": "a</s>"}]
        with vocabulary(path) as judge:
            assert judge is not None
            assert found.apply_chat_template(asked) == judge.encode("a</s>", add_special=True)
            literal = judge.encode("a</s>", add_special=True, parse_special=False)
        assert chat_prompt(found, asked, ChatFormat())["prompt_token_ids"] == literal


@needs_llama_cpp
def test_phi_3s_special_tokens_swallow_white_space(tmp_path: Path) -> None:
    words = small(**{"<|user|>": CONTROL, "<|end|>": CONTROL, "<unk>": CONTROL, "<|endoftext|>": CONTROL})
    path = write_file(tmp_path / "x.gguf", words, pre="gpt-2", entries={"general.name": "Phi-3 mini"})
    check_equal(path, ["<s> a<|user|>\n hi<|end|>\n<|endoftext|> x</s>  y"])


def test_a_template_for_tools_is_the_files(tmp_path: Path) -> None:
    entries = {"tokenizer.chat_template": "plain", "tokenizer.chat_template.tool_use": "tools"}
    found = opened(write_file(tmp_path / "x.gguf", small(), pre="gpt-2", entries=entries))
    asked = [{"role": "user", "content": "a"}]
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    assert (found.render(asked, True), found.render(asked, True, tools=[tool])) == ("plain", "tools")


# ---------------------------------------------------------------------------------------------- what cannot be honoured


def without_merges(words: Words) -> Words:
    return words._replace(merges=["\u0120 x"])


def with_equal_scores(words: Words) -> Words:
    return words._replace(scores=[0.0] * len(words.tokens))


@pytest.mark.parametrize(
    ("make", "model", "entries", "problem"),
    [
        (small, "gpt2", {f"{PREFIX}eot_token_id": 4294967295}, r"eot_token_id is 4294967295; the vocabulary has 259"),
        (small, "gpt2", {f"{PREFIX}fim_pad_token_id": 259}, r"fim_pad_token_id is 259; the vocabulary has 259 tokens"),
        *(
            (small, "gpt2", {f"{PREFIX}{role}_token_id": 999}, rf"{role}_token_id is 999; .*259")
            for role in ("bos", "eos", "eot", "unknown", "padding", "fim_pre")
        ),
        (small, "gpt2", {f"{PREFIX}add_bos_token": 1}, r"add_bos_token is 1; it has to be true or false"),
        (lambda: without_merges(small()), "gpt2", {}, r'merges\[0\] is "\\u0120 x", which makes no token of two'),
        (lambda: small(**{"<s>2": CONTROL})._replace(kinds=[1]), "gpt2", {}, r"token_type is 1 of int32; it has to be"),
        (sentencepiece_words, "gpt2", {}, r"merges is missing"),
        (small, "llama", {}, r"scores is missing; this kind of tokenizer has a finite one for each of 259 tokens"),
        (lambda: with_equal_scores(sentencepiece_words()), "llama", {}, r"scores is 0 for both .* order is open"),
        (lambda: sentencepiece_words()._replace(scores=[float("nan")] * 5), "llama", {}, r"scores is 5 numbers"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_its_name(
    tmp_path: Path, make: Callable[[], Words], model: str, entries: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigError, match=rf"x\.gguf: {PREFIX}{problem}"):
        opened(write_file(tmp_path / "x.gguf", make(), model=model, pre="llama-bpe", entries=entries))


def test_a_token_that_is_there_twice_is_named(tmp_path: Path) -> None:
    words = small(a=NORMAL)
    with pytest.raises(ConfigError, match=rf'{PREFIX}tokens\[64\] is "a", and so is another token'):
        opened(write_file(tmp_path / "x.gguf", words, pre="gpt-2"))


def test_letters_that_are_no_tokens_are_named(tmp_path: Path) -> None:
    words = sentencepiece_words()
    tokens = [*words.tokens, "\u01c1\u01c2"]
    more = Words(tokens, [*words.kinds, NORMAL], [], [*words.scores, -5000.0])
    with pytest.raises(ConfigError, match=r'tokens holds \d+ \(\u01c1\u01c2\), and "\\u01c1" is no token of its own'):
        opened(write_file(tmp_path / "x.gguf", more, model="llama"))
