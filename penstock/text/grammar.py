"""Structured outputs as grammars of llguidance, and a checkpoint's tokenizer as llguidance needs it."""

from __future__ import annotations

import json
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Final

from llguidance import LLMatcher, LLTokenizer, grammar_from

from penstock.core import RequestError, StructuredOutputsParams
from penstock.text.tokenizer import load_tokenizer, usable_tokenizer

CHECKED: Final = 256
"""Grammars of which it is remembered whether they can be used."""
ANY_OBJECT: Final = '{"type": "object"}'
JSON_DEFAULTS: Final[Any] = {"whitespace_pattern": r"( |\n {0,32})?"}
"""Between JSON's tokens stands at most a blank or an indented new line: a weak model would go on with blanks."""


@lru_cache(CHECKED)
def grammar_of(params: StructuredOutputsParams) -> str:
    """The grammar, as text that every stage can read. Raises RequestError where llguidance cannot write one."""
    kind: Any = params.kind
    text: Any = getattr(params, kind)
    if kind == "json_object":
        kind, text = "json", ANY_OBJECT
    elif kind == "choice":
        text = json.dumps(text)
    try:
        return LLMatcher.grammar_from_json_schema(text, JSON_DEFAULTS) if kind == "json" else grammar_from(kind, text)
    except ValueError as error:
        raise RequestError(f"structured_outputs.{params.kind}: {error}") from error


def check_grammar(params: StructuredOutputsParams, tokenizer: LLTokenizer) -> None:
    """Raise RequestError, with what llguidance says, unless the grammar compiles and allows some text."""
    if problem := problem_of(grammar_of(params), tokenizer):
        raise RequestError(f"structured_outputs.{params.kind}: {problem}")


@lru_cache(CHECKED)
def problem_of(grammar: str, tokenizer: LLTokenizer) -> str:
    """What keeps the grammar from being used; nothing if it can be."""
    failed, messages = LLMatcher.validate_grammar_with_warnings(grammar, tokenizer)
    if failed:
        return messages[0].strip()
    matcher = compile_grammar(grammar, tokenizer)
    matcher.compute_bitmask()
    return f"it allows no text ({error_of(matcher)})" if matcher.is_error() else ""


def error_of(matcher: LLMatcher) -> str:
    """What a matcher in an error state says of it, without its dump of parser and grammar."""
    return matcher.get_error().partition("\n")[0]


def compile_grammar(grammar: str, tokenizer: LLTokenizer) -> LLMatcher:
    """A matcher at the beginning of the text. It never raises: one that fails stays in an error state."""
    return LLMatcher(tokenizer, grammar, log_level=0)


@cache
def load_grammar_tokenizer(folder: Path, vocab_size: int, eos_token_ids: tuple[int, ...]) -> LLTokenizer:
    """The tokenizer beside a checkpoint; ``eos_token_ids`` end a text. Takes up to a second: done once a process.

    ``vocab_size`` is the model's, which may be padded. Raises ConfigError when there is none that llguidance can read.
    """
    tokenizer = load_tokenizer(folder)
    size = max(vocab_size, len(tokenizer))
    with usable_tokenizer(folder):
        return LLTokenizer(tokenizer.serialized(), n_vocab=size, eos_token=list(eos_token_ids))
