"""Hostile grammars: each is followed or refused, the same each time, and nobody else waits for it."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from benchmarks.load.attacking.trying import Fault
from benchmarks.load.attacking.victim import Answer, Victim, victim

REPEATS: Final = ("*", "+", "?", "{3}", "{0,5}", "{1000}", "{1,10000}", "{50,}", "{100000}", "{2,1}")
ATOMS: Final = (
    "a",
    "[a-z]",
    ".",
    r"\d",
    r"\w",
    "[^x]",
    "é",
    r"\p{L}",
    "(a|b)",
    "(ab|a|b)",
    "日",
    r"\x00",
    "[",
    "(?=a)",
    r"\1",
)
LARK: Final = (
    *("start: a\na: a", "start: /(a+)+/", "start: x x\nx: /[a-z]{0,500}/ | x x", "start:", "start: /a/\nstart: /b/"),
    *(
        'start: "a"~1000',
        'start: ("a" start "b")?',
        "start: %json {}",
        "%ignore /a*/\nstart: /a*/ start?",
        "start: nothing",
    ),
)
EVERY: Final = 5


class Grammars:
    def __init__(self, victim: Victim) -> None:
        self._victim = victim
        self._left = EVERY

    def attempt(self, rng: random.Random) -> str:
        kind, grammar, simple = drawn(rng)
        answer = self._ask(kind, grammar)
        if answer.status == 200:
            keeps(kind, grammar, simple, answer.json()["choices"][0])
        with self._victim.beside_others():
            again = self._ask(kind, grammar)
        if told(again) != told(answer) and not (overran(again) and overran(answer)):
            raise Fault(f"{kind} {grammar!r:.2000}: {told(answer)}, the second time {told(again)}")
        self._left -= 1
        if not self._left:
            self._left = EVERY
            self._victim.check_others()
        return f"{kind} {answer.status}"

    def _ask(self, kind: str, grammar: Any) -> Answer:
        body = {"prompt": "x = ", "max_tokens": 16, "temperature": 0, "structured_outputs": {kind: grammar}}
        data = json.dumps(body).encode()
        answer = self._victim.post("/v1/completions", data)
        self._victim.check(answer, data)
        return answer


@contextmanager
def attacked() -> Iterator[Grammars]:
    with victim() as server:
        yield Grammars(server)
        server.check_others()


def told(answer: Answer) -> Any:
    """The part of an answer that is the same for the same request."""
    content = answer.json()
    if answer.status != 200:
        return answer.status, content["error"]["message"]
    choice = content["choices"][0]
    return choice["text"], choice["finish_reason"]


def overran(answer: Answer) -> bool:
    """Whether a worker was ended because of a grammar, for its time or its memory."""
    return answer.status == 400 and "to compile it" in answer.json()["error"]["message"]


def keeps(kind: str, grammar: Any, simple: bool, choice: dict[str, Any]) -> None:
    """Raise Fault unless the text matches the grammar, or may still do so where it was cut off, as far as is known.

    ``simple``: a regex that Python's own engine understands alike, and decides soon.
    """
    text, whole = choice["text"], choice["finish_reason"] == "stop"
    kept = True
    if kind == "choice":
        kept = text in grammar if whole else any(one.startswith(text) for one in grammar)
    elif kind == "regex" and simple and whole:
        kept = re.fullmatch(grammar, text) is not None
    elif kind == "json" and whole:
        try:
            json.loads(text)
        except ValueError:
            kept = False
    if not kept:
        raise Fault(f"{kind} {grammar!r:.2000} is not kept to: {choice}")


def drawn(rng: random.Random) -> tuple[str, Any, bool]:
    """A kind, a grammar of it, and whether it is a simple regex."""
    kind = rng.choice(("regex", "regex", "regex", "json", "choice", "grammar"))
    if kind == "choice":
        words = ["a" * rng.choice((0, 1, 7, 5000)), "ab", "\0", "é", "日本", "</s>", '"', "a\nb", *map(str, range(500))]
        return kind, rng.sample(words, rng.choice((0, 1, 2, 8, 300))), False
    if kind == "json":
        return kind, schema(rng, rng.randint(1, 5)), False
    if kind == "grammar":
        return kind, rng.choice(LARK) + rng.choice(("", "", "\n" + "b: /x/\n" * rng.choice((1, 2000)))), False
    if rng.random() < 0.4:
        return (
            kind,
            "".join(f"[{rng.choice('abc')}-z]{{{rng.randint(0, 3)},{rng.randint(3, 6)}}}" for _ in range(3)),
            True,
        )
    return kind, regex(rng, rng.randint(1, 4)), False


def regex(rng: random.Random, depth: int) -> str:
    if not depth:
        return rng.choice(ATOMS) + rng.choice(("", *REPEATS))
    parts = [regex(rng, depth - 1) for _ in range(rng.randint(1, 3))]
    return f"({rng.choice(('', '|')).join(parts)}){rng.choice(('', *REPEATS))}"


def schema(rng: random.Random, depth: int) -> dict[str, Any]:
    """A JSON schema, mostly sound, and often one of very many or very long values."""
    if not depth:
        return unsound(rng) if rng.random() < 0.1 else leaf(rng)
    inner = [schema(rng, depth - 1) for _ in range(rng.randint(1, 3))]
    return rng.choice(
        (
            {"type": "object", "properties": dict(zip("abc", inner, strict=False)), "required": ["a"]},
            {"type": "object", "properties": {"a": inner[0]}, "additionalProperties": rng.random() < 0.5},
            {"type": "array", "items": inner[0], "minItems": rng.choice((0, 3, 1000))},
            {"type": "array", "items": inner[0], "maxItems": rng.choice((0, 2, 10**9))},
            {rng.choice(("anyOf", "anyOf", "oneOf", "allOf")): inner},
        )
    )


def leaf(rng: random.Random) -> dict[str, Any]:
    return rng.choice(
        (
            {"type": "integer", "minimum": rng.choice((0, -(10**18))), "maximum": rng.choice((5, 10**18))},
            {"type": "integer", "multipleOf": rng.choice((7, 9973, 99991, 99999989))},
            {"allOf": [{"type": "integer", "multipleOf": prime} for prime in rng.sample((9973, 9967, 9949, 9941), 3)]},
            {"type": "string", "maxLength": rng.choice((0, 5, 10**6))},
            {"type": "string", "pattern": rng.choice(("a+", "^[a-z]{3}$", "(a{99}){99}"))},
            {"type": "string", "format": rng.choice(("date-time", "ipv6", "uuid"))},
            {"enum": [f"{number}" for number in range(rng.choice((1, 5, 3000)))]},
            {"const": rng.choice((None, 1, "a", "a" * 5000, {"a": []}))},
            {"type": rng.choice(("number", "null", "boolean", ["string", "null"]))},
        )
    )


def unsound(rng: random.Random) -> dict[str, Any]:
    return rng.choice(
        (
            {"type": rng.choice(("nothing", [], 5))},
            {"enum": rng.choice(([], "a", [1e400]))},
            {"$ref": rng.choice(("#", "#/nothing", "http://127.0.0.1:1/x", "file:///etc/passwd"))},
            {"not": {"type": "string"}},
            {"type": "string", "pattern": rng.choice(("[", "(?=a)", regex(rng, 2)))},
            {"patternProperties": {regex(rng, 1): {}}},
            {"type": "array", "minItems": 10**9, "maxItems": 2},
            {"type": "integer", "minimum": -(10**30), "maximum": 10**30},
        )
    )
