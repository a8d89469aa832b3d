"""Structured outputs as grammars of llguidance, and a checkpoint's tokenizer as llguidance needs it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Final

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from

from penstock.core import ConfigError, RequestError, StructuredOutputsParams
from penstock.text.schemas import tidied
from penstock.text.tokenizer import Tokenizer, load_tokenizer, usable_tokenizer
from penstock.text.workers import Failed, Job, Overrun, Vocabulary, workers

CHECKED: Final = 256
"""Grammars of which it is remembered whether they can be used."""
SECONDS: Final = 1.0
"""Processor time in which a grammar has to compile and give its first mask; usual ones take milliseconds."""
MEMORY: Final = 1 << 26
"""Bytes that it may take meanwhile, and that a stage then keeps for each request with such a grammar.

Schemas with two thousand alternatives take 38 MiB, usual ones next to nothing.
"""
ANY_OBJECT: Final = '{"type": "object"}'
LIMITS: Final = LLParserLimits(initial_lexer_fuel=200_000, step_lexer_fuel=100_000, verbose_errors=False)
"""What a grammar may cost when it is compiled and at each token; the rest is llguidance's defaults.

A unit of fuel is an expression that the lexer builds. Nested repetitions take most, a quarter of a microsecond: 60 ms
to prepare and 30 ms at a token, where llguidance allows itself up to a second. JSON schemas of 60,000 characters fit.
"""
BLIND_ALLEY: Final = "NoExtensionBias"
"""What llguidance calls a text after which no token is possible."""
JSON_DEFAULTS: Final[Any] = {"whitespace_pattern": r"( |\n {0,32})?"}
"""Between JSON's tokens stands at most a blank or an indented new line: a weak model would go on with blanks."""


@lru_cache(CHECKED)
def grammar_of(params: StructuredOutputsParams) -> str:
    """The grammar, as text that every stage can read. Raises RequestError where llguidance cannot write one."""
    kind: Any = params.kind
    text: Any = getattr(params, kind)
    if kind == "json_object":
        kind, text = "json", ANY_OBJECT
    elif kind == "json":
        text = json.dumps(tidied(json.loads(text)))
    elif kind == "choice":
        text = json.dumps(text)
    try:
        return LLMatcher.grammar_from_json_schema(text, JSON_DEFAULTS) if kind == "json" else grammar_from(kind, text)
    except ValueError as error:
        raise RequestError(f"structured_outputs.{params.kind}: {error}") from error


def check_grammar(params: StructuredOutputsParams, tokenizer: Tokenizer, vocab_size: int, ends: Sequence[int]) -> None:
    """Raise RequestError, saying why, unless the grammar compiles within a worker's limits and allows some text.

    ``vocab_size`` is the model's, ``ends`` are the token ids that end a text.
    """
    grammar = grammar_of(params)
    size = max(vocab_size, len(tokenizer))
    try:
        problem = worker_finds(grammar, tokenizer.vocabulary, size, tuple(ends))
    except Overrun as overrun:
        remedy = "state it with less repetition, fewer alternatives or smaller numbers"
        raise RequestError(f"structured_outputs.{params.kind}: to compile it {overrun.what}; {remedy}") from overrun
    except Failed as error:
        raise RequestError(f"structured_outputs.{params.kind}: it cannot be compiled ({error.what})") from error
    if problem:
        raise RequestError(f"structured_outputs.{params.kind}: {problem}")


@lru_cache(CHECKED)
def worker_finds(grammar: str, vocabulary: Vocabulary, size: int, ends: tuple[int, ...]) -> str:
    """What a worker finds to keep a grammar from being used; nothing if it can be.

    Raises Overrun where that takes more than it may, and ConfigError for a tokenizer that llguidance cannot read.
    """
    given = {"grammar": grammar, "vocab_size": size, "eos_token_ids": ends}
    found = workers().run(Job("check_grammar", given, SECONDS, vocabulary, MEMORY))
    if "unusable" in found:
        raise ConfigError(f"model: the tokenizer cannot be used for structured outputs ({found['unusable']})")
    problem: str = found["problem"]
    return problem


def problem_of(grammar: str, tokenizer: LLTokenizer) -> str:
    """What keeps the grammar from being used; nothing if it can be. It may take all time and memory: in a worker."""
    matcher = compile_grammar(grammar, tokenizer)
    if matcher.is_error():
        return matcher.get_error().strip()
    _, error = next_tokens(matcher, tokenizer.vocab_size)
    return f"it allows no text ({error})" if error.startswith(BLIND_ALLEY) else explained(error)


def next_tokens(matcher: LLMatcher, vocab_size: int) -> tuple[np.ndarray, str]:
    """bool [V]: what may come next; and llguidance's error, after which the mask means nothing."""
    bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
    mask_V = np.unpackbits(bits, count=vocab_size, bitorder="little").astype(bool)
    return mask_V, error_of(matcher, int(mask_V.argmax()))


def error_of(matcher: LLMatcher, token: int) -> str:
    """Why a matcher can say nothing more, without its dump of parser and grammar; nothing while it can.

    A lexer that runs out of fuel while it looks for forced bytes, or validates tokens, is broken but does not say so:
    to it, everything is forbidden. Consuming a token asks it, which a copy does here; ``token`` may be any one.
    """
    error = matcher.get_error()
    if not error:
        asked = matcher.deep_copy()
        asked.consume_token(token)
        error = asked.get_error() if is_lexer_error(asked.get_error()) else ""
    return error.partition("\n")[0]


def is_lexer_error(error: str) -> bool:
    """Whether a lexer has run out of fuel, for good: that of all copies of a matcher."""
    return error.startswith("lexer error")


def explained(error: str) -> str:
    """An error of llguidance as part of a sentence."""
    if error.startswith(BLIND_ALLEY):
        return f"no token is possible here ({error})"
    return f"it is exhausted, its next step costs more than a grammar's may ({error})" if error else ""


def compile_grammar(grammar: str, tokenizer: LLTokenizer) -> LLMatcher:
    """A matcher at the beginning of the text, with a lexer of its own: copies of a matcher share one, and its errors.

    It never raises: one that fails stays in an error state. Other threads go on meanwhile. ``LIMITS`` do not bound all
    that it may take: whoever compiles a stranger's grammar here has had a worker do so before.
    """
    return LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)


@cache
def load_grammar_tokenizer(folder: Path, vocab_size: int, eos_token_ids: tuple[int, ...]) -> LLTokenizer:
    """The tokenizer beside a checkpoint; ``eos_token_ids`` end a text. Takes up to a second: done once a process.

    ``vocab_size`` is the model's, which may be padded. Raises ConfigError when there is none that llguidance can read.
    """
    tokenizer = load_tokenizer(folder)
    size = max(vocab_size, len(tokenizer))
    with usable_tokenizer(folder):
        return LLTokenizer(tokenizer.serialized(), n_vocab=size, eos_token=list(eos_token_ids))
