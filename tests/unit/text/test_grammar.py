"""Structured outputs as grammars: what compiles, and what is said of what does not."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLTokenizer

from penstock.core import ConfigError, RequestError, StructuredOutputsParams
from penstock.engine.options import DEMO
from penstock.text.grammar import check_grammar, compile_grammar, grammar_of, load_grammar_tokenizer
from penstock.text.tokenizer import load_tokenizer
from penstock.text.workers import Vocabulary

EOS = 2


@pytest.fixture(scope="module")
def tokenizer() -> LLTokenizer:
    return load_grammar_tokenizer(DEMO / "target", 4096, (EOS,))


def check(**given: Any) -> None:
    check_grammar(StructuredOutputsParams(**given), load_tokenizer(DEMO / "target"), 4096, (EOS,))


def accepts(tokenizer: LLTokenizer, text: str, **given: Any) -> bool:
    """Whether ``text`` can be the whole output."""
    params = StructuredOutputsParams(**given)
    check(**given)
    matcher = compile_grammar(grammar_of(params), tokenizer)
    ids = load_tokenizer(DEMO / "target").encode(text, add_special_tokens=False)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("given", "fits", "fails"),
    [
        ({"json": {"type": "array", "items": {"type": "integer"}}}, "[1, 2]", "[1.5]"),
        ({"json": '{"enum": ["x", 3]}'}, "3", '"y"'),
        ({"json_object": True}, '{"a": [null, {}]}', "[1]"),
        ({"regex": r"[a-c]{2}\d"}, "ab7", "ab"),
        ({"regex": "a|b"}, "b", "ab"),
        ({"choice": ['say "hi"\n', "Größe \\ €", "no"]}, 'say "hi"\n', "n"),
        ({"choice": ['say "hi"\n', "Größe \\ €", "no"]}, "Größe \\ €", "Größe"),
        ({"grammar": 'start: "a" B+\nB: /[0-9]/'}, "a12", "a"),
        ({"grammar": 'root ::= "a" digit+\ndigit ::= [0-9]'}, "a12", "a"),
    ],
)
def test_an_output_is_what_was_asked_for(tokenizer: LLTokenizer, given: dict[str, Any], fits: str, fails: str) -> None:
    assert accepts(tokenizer, fits, **given)
    assert not accepts(tokenizer, fails, **given)


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"json": {"type": "nonsense"}}, r"structured_outputs\.json: Invalid type: nonsense"),
        ({"json": {"uniqueItems": True}}, r'structured_outputs\.json: Unimplemented keys: \["uniqueItems"\]'),
        ({"json": {"$ref": "http://x.test/y"}}, r"structured_outputs\.json: .*http://x\.test/y"),
        ({"regex": "a(b"}, r"structured_outputs\.regex: .*unclosed group"),
        ({"grammar": "start: thing"}, r'structured_outputs\.grammar: .*unknown name: "thing"'),
        ({"grammar": "start: <|nowhere|>"}, r"structured_outputs\.grammar: .*unknown special token"),
        ({"grammar": "root ::= ("}, r"structured_outputs\.grammar: "),
        ({"grammar": 'start: start "a"'}, r"structured_outputs\.grammar: it allows no text"),
    ],
)
def test_what_does_not_compile_is_named_with_what_llguidance_says(given: dict[str, Any], complaint: str) -> None:
    with pytest.raises(RequestError, match=f"(?s){complaint}"):
        check(**given)


PRIMES = (9973, 9967, 9949, 9941)
LARGE = {"type": "integer", "multipleOf": 99999989}


@pytest.mark.parametrize(
    "given",
    [
        {"json": LARGE},
        {"json": {"allOf": [{"type": "integer", "multipleOf": prime} for prime in PRIMES]}},
        # Refused for their time, as the first is.
        pytest.param(
            {"json": {"properties": {"a": {"items": {"anyOf": [LARGE, {"type": "string"}]}}}}}, marks=pytest.mark.whole
        ),
        pytest.param({"json": {"type": "number", "multipleOf": 99999.989}}, marks=pytest.mark.whole),
        {"grammar": f"start: x\nx: %json {json.dumps(LARGE)}"},
    ],
)
def test_what_llguidance_does_not_bound_is_refused_by_its_field(given: dict[str, Any]) -> None:
    field = next(iter(given))
    with pytest.raises(RequestError, match=rf"structured_outputs\.{field}: to compile it .*; state it with less"):
        check(**given)
    check(regex="fine")


def test_a_tokenizer_that_llguidance_cannot_read_is_the_checkpoints_fault() -> None:
    tokenizer = load_tokenizer(DEMO / "target")
    object.__setattr__(tokenizer, "vocabulary", Vocabulary("strange", '{"model": 1}'))
    with pytest.raises(ConfigError, match="model: the tokenizer cannot be used for structured outputs"):
        check_grammar(StructuredOutputsParams(regex="a"), tokenizer, 4096, (EOS,))


def test_the_tokenizer_is_read_once(tokenizer: LLTokenizer) -> None:
    assert load_grammar_tokenizer(DEMO / "target", 4096, (EOS,)) is tokenizer
    assert tokenizer.eos_tokens == [EOS]
    assert load_grammar_tokenizer(DEMO / "target", 5000, (EOS,)).vocab_size == 5000, "a padded vocabulary"
