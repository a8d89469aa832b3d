"""Tokens by their own bytes, and where they stand in a text."""

from __future__ import annotations

import pytest

from penstock.server.openai.reply import TextOffsets
from penstock.text.tokenizer import Tokenizer
from tests.unit.text.conftest import BUILDERS, byte_fallback, byte_level

TEXTS = ["a the water", "Größe 水車 🙂👩‍🔧!", "the🙂 the", " [x]: 3"]


@pytest.mark.parametrize("build", BUILDERS[:3], ids=lambda build: build.__name__)
@pytest.mark.parametrize("text", TEXTS)
def test_the_bytes_of_a_texts_tokens_are_its_own(build: object, text: str) -> None:
    tokenizer: Tokenizer = build()  # type: ignore[operator]
    ids = tokenizer.encode(text, add_special_tokens=False)
    if tokenizer.decode(ids) != text:
        ids = tokenizer.encode("the water", add_special_tokens=False)  # what this vocabulary can say
        text = tokenizer.decode(ids)
    assert b"".join(tokenizer.token_bytes(token) for token in ids).decode().strip() == text.strip()


def test_a_special_token_is_its_name() -> None:
    tokenizer = byte_level()
    assert tokenizer.token_bytes(tokenizer.eos_token_ids[0]) == b"</s>"
    assert tokenizer.token_bytes(10**6) == b""


@pytest.mark.parametrize("build", [byte_level, byte_fallback], ids=lambda build: build.__name__)
@pytest.mark.parametrize("burst", [1, 3, 100])
def test_places_are_in_the_text_also_of_parts_of_characters(build: object, burst: int) -> None:
    tokenizer: Tokenizer = build()  # type: ignore[operator]
    prompt = tokenizer.encode("x", add_special_tokens=False)
    ids = tokenizer.encode("the 🙂é the", add_special_tokens=False)
    places = TextOffsets(tokenizer, prompt, skip_special_tokens=True)
    found = [place for at in range(0, len(ids), burst) for place in places.of(ids[at : at + burst])]
    text = tokenizer.decode(prompt + ids).removeprefix(tokenizer.decode(prompt))
    for number, (token, place) in enumerate(zip(ids, found, strict=True)):
        own = tokenizer.token_bytes(token)
        before = b"".join(tokenizer.token_bytes(one) for one in ids[:number])
        assert place == len(before.decode(errors="ignore"))
        if place == len(before.decode(errors="replace")) and "\ufffd" not in own.decode(errors="replace"):
            assert text[place:].startswith(own.decode())


def test_a_special_token_that_the_text_leaves_out_takes_no_place() -> None:
    tokenizer = byte_level()
    (end,) = tokenizer.eos_token_ids
    a, b = (tokenizer.encode(text, add_special_tokens=False)[0] for text in "ab")
    assert TextOffsets(tokenizer, [], skip_special_tokens=True).of([a, end, b]) == [0, 1, 1]
    assert TextOffsets(tokenizer, [], skip_special_tokens=False).of([a, end, b]) == [0, 1, 5]
