"""Structured outputs as llguidance grammars, and a checkpoint's tokenizer in the form that llguidance needs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Final

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from

from penstock.core import ConfigError, RequestError, StructuredOutputsParams
from penstock.text.tokenizer import Tokenizer, load_tokenizer, usable_tokenizer
from penstock.text.workers import Failed, Job, Overrun, Vocabulary, workers

# -------------------------------------------------------------------------------------------------------------- schemas
# JSON schemas without keywords that have no effect, some of which llguidance would refuse.

OF_ONE: Final = (
    "items",
    "additionalItems",
    "additionalProperties",
    "propertyNames",
    "contains",
    "not",
    "if",
    "then",
    "else",
    "unevaluatedItems",
    "unevaluatedProperties",
    "contentSchema",
)
"""Keywords whose value is a schema (JSON Schema 2020-12 and its forerunners)."""
OF_SEVERAL: Final = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
"""Keywords whose value is a list of schemas."""
OF_NAMED: Final = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords whose value maps names to schemas."""
NEUTRAL: Final[dict[str, tuple[Any, ...]]] = {
    "uniqueItems": (False,),
    "unevaluatedItems": (True,),
    "unevaluatedProperties": (True,),
    "propertyNames": (True, {}),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "minContains": (0,),
    "not": (False,),
}
"""Keywords with the values at which they allow everything."""
BOUNDING: Final = (
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    *("enum", "const"),
)
"""Keywords with which llguidance writes numbers without exponents anyway."""
FINITE: Final = {"type": "number", "minimum": -1e16, "maximum": 1e16}
"""The schema of numbers with decimals. Beyond these bounds doubles are whole numbers."""
COMPOSING: Final = ("allOf", "anyOf", "oneOf")
"""Keywords whose schemas hold together with the keywords beside them."""
REMARKS: Final = frozenset(
    ("title", "description", "default", "examples", "$comment", "deprecated", "readOnly", "writeOnly", "x-guidance")
) | {"$schema", "$id", "$anchor", "$defs", "definitions"}
"""Keywords that do not constrain a value."""
ANY_VALUE: Final = "any value, with finite numbers"
"""The name of the definition of ``OF_ANYTHING`` within a schema."""
ANYTHING: Final = {"$ref": f"#/$defs/{ANY_VALUE.replace(' ', '%20')}"}
"""A reference to that definition, in place of a schema that allows everything."""
OF_ANYTHING: Final = {
    "anyOf": [
        {"type": ["null", "boolean", "string", "integer"]},
        FINITE,
        {"type": "array", "items": ANYTHING},
        {"type": "object", "additionalProperties": ANYTHING},
    ]
}
"""Any JSON value whose numbers every reader can hold."""
KNOWN_SCHEMAS: Final = "json-schema.org/"
"""The part of ``$schema`` by which JSON Schema is known."""
FORMATS: Final = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown")
)
"""Formats that llguidance knows. Others are ignored, as JSON Schema asks."""


def tidied(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema without unknown formats and keywords that allow everything, and with finite numbers.

    Values that are no schemas, those of ``enum``, ``const`` and ``default``, stay as they are.
    """
    found: dict[str, Any] = _tidied(schema)
    # The definition is added only where something refers to it.
    if ANYTHING["$ref"] in json.dumps(found):
        found["$defs"] = {**found.get("$defs", {}), ANY_VALUE: OF_ANYTHING}
    return found


def _tidied(schema: Any, composed: bool = False) -> Any:
    """``tidied`` for a schema within. If ``composed``, keywords of the schema around it constrain its values, too."""
    if schema is True and not composed:
        return ANYTHING
    if not isinstance(schema, Mapping):
        return schema
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if value in NEUTRAL.get(key, ()) or is_remark(key, value):
            continue
        if key in OF_SEVERAL and isinstance(value, list):
            value = [_tidied(one, key in COMPOSING) for one in value]
        elif key in OF_ONE:
            value = _tidied(value)
        elif key in OF_NAMED and isinstance(value, Mapping):
            value = {name: _tidied(one) for name, one in value.items()}
        found[key] = value
    return with_finite_numbers(found if composed else with_known_values(found))


def with_known_values(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with ANYTHING for the values that it leaves open, so that their numbers are finite, too."""
    if not schema.keys() - REMARKS:
        return schema | ANYTHING
    stated = schema.get("type")
    kinds = stated if isinstance(stated, list) else [stated]
    if any(key in schema for key in (*COMPOSING, "$ref")):
        return schema
    if "object" in kinds and "additionalProperties" not in schema:
        schema = schema | {"additionalProperties": ANYTHING}
    if "array" in kinds and "items" not in schema:
        schema = schema | {"items": ANYTHING}
    return schema


def with_finite_numbers(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with numbers that every JSON reader can hold: without exponents, as most readers refuse 1e999.

    llguidance has no option for exponents, but allows none in numbers with bounds. Outside the bounds of FINITE whole
    numbers are allowed.
    """
    stated = schema.get("type")
    kinds = stated if isinstance(stated, list) else [stated]
    if "number" not in kinds or any(key in schema for key in BOUNDING):
        return schema
    others = [kind for kind in kinds if kind not in ("number", "integer")]
    alternatives: list[dict[str, Any]] = [{"type": "integer"}, FINITE, *([{"type": others}] if others else [])]
    rest = {key: value for key, value in schema.items() if key != "type"}
    # The schema's own ``anyOf`` has to hold, too: both go into ``allOf``.
    if "anyOf" in rest:
        return rest | {"allOf": [*rest.get("allOf", ()), {"anyOf": alternatives}]}
    return rest | {"anyOf": alternatives}


def is_remark(key: str, value: Any) -> bool:
    """Whether a keyword is to be ignored: an unknown format, or a ``$schema`` other than JSON Schema."""
    if key == "format":
        return not isinstance(value, str) or value not in FORMATS
    return key == "$schema" and not (isinstance(value, str) and KNOWN_SCHEMAS in value)


def property_of(schema: Mapping[str, Any], key: str) -> dict[str, Any]:
    """The schema of one property on its own. It keeps the whole schema in ``$defs``, for references to resolve."""
    whole = moved({name: value for name, value in schema.items() if name != "$id"}, schema.get("$id", ""))
    pointer = key.replace("~", "~0").replace("/", "~1").replace("%", "%25")
    return {"$ref": f"#/$defs/whole/properties/{pointer}", "$defs": {"whole": whole}}


def moved(schema: Any, own: str) -> Any:
    """``schema`` with its references rewritten for a place at ``#/$defs/whole``; ``own`` is its ``$id``, or ""."""
    if isinstance(schema, list):
        return [moved(one, own) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    found = {key: value if key in VALUES else moved(value, own) for key, value in schema.items()}
    if isinstance(reference := schema.get("$ref"), str):
        pointer = reference.removeprefix(own) or "#"
        if pointer == "#" or pointer.startswith("#/"):
            found["$ref"] = f"#/$defs/whole{pointer[1:]}"
    return found


VALUES: Final = ("enum", "const", "default", "examples")
"""Keywords that hold values, not schemas."""


# -------------------------------------------------------------------------------------------------------------- grammar
# Grammars in llguidance's text format: made, checked within limits, and asked for the next tokens.

CHECKED: Final = 256
"""Grammars whose check is cached. Each is kept as text; an evicted one is checked anew."""
SECONDS: Final = 1.0
"""Seconds of processor time in which a grammar has to compile and give its first mask; usual ones take milliseconds."""
TOKEN_SECONDS: Final = 0.002
"""Further seconds of processor time for each token of a text that is read; usual ones take microseconds."""
MEMORY: Final = 1 << 26
"""Bytes that a grammar may take while it compiles. A stage keeps as much for each request with such a grammar.

Schemas with two thousand alternatives take 38 MiB, usual ones next to nothing.
"""
ANY_OBJECT: Final = '{"type": "object"}'
"""The schema of ``json_object``."""
LIMITS: Final = LLParserLimits(initial_lexer_fuel=200_000, step_lexer_fuel=100_000, verbose_errors=False)
"""Limits on a grammar's cost when it is compiled and at each token; other limits are llguidance's defaults.

A unit of fuel is an expression that the lexer builds. Units of nested repetitions take longest, 0.25 us each: 60 ms
to prepare and 30 ms per token, where llguidance's own limits allow up to 1 s. JSON schemas of 60,000 characters fit.
"""
BLIND_ALLEY: Final = "NoExtensionBias"
"""llguidance's error for a text after which no token is possible."""
JSON_DEFAULTS: Final[Any] = {"whitespace_pattern": r"( |\n {0,32})?"}
"""At most a space or an indented new line between JSON's tokens: a weak model would repeat spaces without end."""


@lru_cache(CHECKED)
def grammar_of(params: StructuredOutputsParams) -> str:
    """The grammar in llguidance's text format, which every stage can read. Raises RequestError if there can be none."""
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


def check_output(
    params: StructuredOutputsParams,
    tokenizer: Tokenizer,
    vocab_size: int,
    ends: Sequence[int],
    output: Sequence[int],
    *,
    ended: bool,
) -> str:
    """Why the grammar does not allow the token ids ``output`` as a beginning of its text; "" if it does.

    ``output`` has none of ``ends``; ``ended`` says that one follows it, so that it has to be the whole text. The
    grammar itself has passed ``check_grammar``.
    """
    given = {
        "grammar": grammar_of(params),
        "vocab_size": max(vocab_size, len(tokenizer)),
        "eos_token_ids": tuple(ends),
        "output": list(output),
        "ended": ended,
    }
    seconds = SECONDS + len(output) * TOKEN_SECONDS
    try:
        problem: str = workers().run(Job("check_grammar", given, seconds, tokenizer.vocabulary, MEMORY))["problem"]
    except Overrun as overrun:
        return f"to read it {overrun.what}"
    except Failed as error:
        return f"it cannot be read ({error.what})"
    return problem


@lru_cache(CHECKED)
def worker_finds(grammar: str, vocabulary: Vocabulary, size: int, ends: tuple[int, ...]) -> str:
    """The problem that a worker finds with a grammar; "" if it can be used.

    Raises Overrun where the check exceeds its limits, and ConfigError for a tokenizer that llguidance cannot read.
    """
    given = {"grammar": grammar, "vocab_size": size, "eos_token_ids": ends}
    found = workers().run(Job("check_grammar", given, SECONDS, vocabulary, MEMORY))
    if "unusable" in found:
        raise ConfigError(f"model: the tokenizer cannot be used for structured outputs ({found['unusable']})")
    problem: str = found["problem"]
    return problem


def problem_of(grammar: str, tokenizer: LLTokenizer, output: Sequence[int] = (), ended: bool = False) -> str:
    """The problem with a grammar, or with ``output`` as its text so far (``check_output``); "" if there is none.

    Only workers call it: it may take any time and memory.
    """
    matcher = compile_grammar(grammar, tokenizer)
    if matcher.is_error():
        return matcher.get_error().strip()
    if output or ended:
        read = matcher.try_consume_tokens(list(output))
        if read < len(output):
            return f"token {output[read]} at place {read} does not fit"
        return "it ends too early" if ended and not matcher.is_accepting() else ""
    _, error = next_tokens(matcher, tokenizer.vocab_size)
    return f"it allows no text ({error})" if error.startswith(BLIND_ALLEY) else explained(error)


def next_tokens(matcher: LLMatcher, vocab_size: int) -> tuple[np.ndarray, str]:
    """The tokens that may come next, bool [V], and llguidance's error, "" for none; with an error the mask is void."""
    bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
    mask_V = np.unpackbits(bits, count=vocab_size, bitorder="little").astype(bool)
    return mask_V, error_of(matcher, int(mask_V.argmax()))


def error_of(matcher: LLMatcher, token: int) -> str:
    """The first line of a matcher's error, without its dump of parser and grammar; "" while the matcher works.

    A lexer that runs out of fuel while it looks for forced bytes, or validates tokens, is broken but reports no error:
    it forbids every token. Consuming a token makes it report, so a copy of the matcher does that here; any ``token``
    will do.
    """
    error = matcher.get_error()
    if not error:
        asked = matcher.deep_copy()
        asked.consume_token(token)
        error = asked.get_error() if is_lexer_error(asked.get_error()) else ""
    return error.partition("\n")[0]


def is_lexer_error(error: str) -> bool:
    """Whether a lexer has run out of fuel. It stays broken, for all copies of its matcher: they share it."""
    return error.startswith("lexer error")


def explained(error: str) -> str:
    """An error of llguidance as part of a sentence; "" for no error."""
    if error.startswith(BLIND_ALLEY):
        return f"no token is possible here ({error})"
    return f"it is exhausted, its next step costs more than a grammar's may ({error})" if error else ""


def compile_grammar(grammar: str, tokenizer: LLTokenizer) -> LLMatcher:
    """A matcher at the beginning of the text. It has its own lexer; copies of a matcher share one, and its errors.

    It never raises: a matcher that fails stays in an error state. Compiling releases the GIL. ``LIMITS`` do not bound
    all of its cost: a stranger's grammar must have passed ``check_grammar``, in a worker, before.
    """
    return LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)


@cache
def load_grammar_tokenizer(folder: Path, vocab_size: int, eos_token_ids: tuple[int, ...]) -> LLTokenizer:
    """llguidance's form of a checkpoint's tokenizer, cached as it takes up to a second; ``eos_token_ids`` end a text.

    ``vocab_size`` is the model's, which may be padded. Raises ConfigError for a tokenizer that llguidance cannot read.
    """
    with usable_tokenizer(folder):
        return grammar_tokenizer(*serialized_tokenizer(folder, vocab_size), eos_token_ids)


def serialized_tokenizer(folder: Path, vocab_size: int) -> tuple[str, int]:
    """A checkpoint's tokenizer as JSON, and the size of the vocabulary. Raises ConfigError if it does not load."""
    tokenizer = load_tokenizer(folder)
    return tokenizer.serialized(), max(vocab_size, len(tokenizer))


def grammar_tokenizer(serialized: str, size: int, eos_token_ids: Sequence[int]) -> LLTokenizer:
    """llguidance's form of a tokenizer. It needs neither torch nor transformers."""
    return LLTokenizer(serialized, n_vocab=size, eos_token=list(eos_token_ids))
