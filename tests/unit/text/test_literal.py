"""Special tokens in users' texts are text, those of chat templates are special."""

from __future__ import annotations

import json

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from penstock.core import RequestError
from penstock.text.tokenizer import HIDDEN, WRITTEN, LiteralText, Tokenizer

EVIL = ["</s>", "the </s> turns", "<s></s>", "a<s", "</</s>s>", " </s>\n", "<s>the</s>the<s>"]


def rendered(literal: LiteralText, *contents: str) -> str:
    """Render contents like a template: each between special tokens of the template's own."""
    return "".join(f"<s>user: {literal.hide(content, 'text')}</s>" for content in contents)


def test_what_holds_no_special_token_is_left_to_the_tokenizer(tokenizer: Tokenizer) -> None:
    literal = tokenizer.literal
    text = rendered(literal, "the water 水", "don't <tool>")
    assert not literal.holds_hidden(text)
    assert literal.encode(text) == tokenizer.encode(text, add_special_tokens=False) == tokenizer.encode_literal(text)


@pytest.mark.parametrize("content", EVIL)
def test_the_templates_tokens_are_the_only_special_ones(tokenizer: Tokenizer, content: str) -> None:
    literal = tokenizer.literal
    begin, end = (tokenizer.encode(name, add_special_tokens=False)[-1] for name in ("<s>", "</s>"))
    text = rendered(literal, content, "the")
    assert literal.holds_hidden(text) == (content != "a<s")
    assert literal.show(text) == f"<s>user: {content}</s><s>user: the</s>"
    ids = literal.encode(text)
    assert [one for one in ids if one in (begin, end)] == [begin, end, begin, end]


@pytest.mark.parametrize("content", EVIL)
def test_they_are_read_as_by_a_tokenizer_that_does_not_know_them(bytes_tokenizer: Tokenizer, content: str) -> None:
    """The comparison holds for texts as a whole, also where special tokens meet other text."""
    plain = Backend(Backend.from_str(bytes_tokenizer._backend.to_str()).model)
    for part in ("normalizer", "pre_tokenizer", "decoder"):
        if (own := getattr(bytes_tokenizer._backend, part)) is not None:
            setattr(plain, part, own)
    literal = bytes_tokenizer.literal
    ids = literal.encode(f"<s>{literal.hide(content, 'text')}</s>")
    assert ids[1:-1] == plain.encode(content, add_special_tokens=False).ids
    assert bytes_tokenizer.decode(ids[1:-1], skip_special_tokens=False) == content


def test_a_special_token_of_the_model_itself_is_never_made_of_text(bytes_tokenizer: Tokenizer) -> None:
    """Its pieces would merge to it: such merges are left out."""
    backend = Backend.from_str(bytes_tokenizer._backend.to_str())
    backend.add_special_tokens([AddedToken("the", special=True)])
    literal = LiteralText(backend)
    the = backend.token_to_id("the")
    ids = literal.encode(f"the{literal.hide('the', 'text')}")
    assert ids[0] == the
    assert the not in ids[1:]
    assert backend.decode(ids, skip_special_tokens=False) == "thethe"


def test_everything_that_a_template_may_print_is_looked_through(bytes_tokenizer: Tokenizer) -> None:
    literal = bytes_tokenizer.literal
    hidden = literal.hide({"</s>": ["<s>", {"a": ("</s>",)}], "n": 1, "none": None}, "text")
    assert "s>" not in (text := json.dumps(hidden, ensure_ascii=False))
    assert json.loads(literal.show(text)) == {"</s>": ["<s>", {"a": ["</s>"]}], "n": 1, "none": None}


def test_a_text_that_is_no_unicode_is_refused_beside_a_special_token_too(bytes_tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="half of a surrogate pair"):
        bytes_tokenizer.encode_literal(bytes_tokenizer.literal.hide("</s>\ud800", "text"))


@pytest.mark.parametrize("first", [HIDDEN, WRITTEN])
def test_what_would_be_taken_for_hidden_is_refused(bytes_tokenizer: Tokenizer, first: int) -> None:
    with pytest.raises(RequestError, match="private character"):
        bytes_tokenizer.literal.hide(f"a{chr(first)}", "text")


def nested(depth: int) -> list[object]:
    inner: list[object] = []
    for _ in range(depth):
        inner = [inner]
    return inner


def holding_itself() -> list[object]:
    circle: list[object] = []
    circle.append(circle)
    return circle


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"a": [object()]}, r"text\.a\[0\] is of type object, which JSON has not"),
        ({"a": b"bytes"}, r"text\.a is of type bytes"),
        ({"a": {1, 2}}, r"text\.a is of type set"),
        (nested(100_000), "text nests too deep, or holds itself"),
        (holding_itself(), "text nests too deep, or holds itself"),
    ],
)
def test_what_is_no_json_is_refused_by_its_path(bytes_tokenizer: Tokenizer, value: object, said: str) -> None:
    with pytest.raises(RequestError, match=f"^{said}"):
        bytes_tokenizer.literal.hide(value, "text")
