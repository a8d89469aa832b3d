"""Guide prompts: instructions to the target ahead of a question, in the question's language."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

GUIDES: Final = Path(__file__).parent / "guides"
DEFAULT: Final = "en"
KINDS: Final = ("list", "code", "math", "short", "text")
"""Forms that an answer can have. Only "list" is decoded in points."""
WORD: Final = re.compile(r"[\u3040-\u30ff\u4e00-\u9fff]|[^\W\u3040-\u30ff\u4e00-\u9fff]+")
"""Pattern of a word, or of one character in languages that write without spaces."""


@dataclass(frozen=True, kw_only=True)
class Guide:
    """One language's texts. ``labels``, ``shots`` and ``samples`` have ``KINDS`` as keys."""

    language: str
    words: frozenset[str]
    """The language's commonest words and those of its guide, by which a question's language is recognised."""
    code_words: list[str]
    """Words that show that a question asks for a program; a question that holds one by chance is answered plainly."""
    decide: str
    """Instruction for naming the form of an answer; ends with examples."""
    ask: str
    """Text of a question in the prompt for its form, with the placeholder ``{question}``."""
    opening: str
    """Text in front of the label."""
    labels: dict[str, str]
    """The label of each form, one word; no two begin with the same letter."""
    samples: dict[str, list[str]]
    """Questions of each form, equally many of each, from which the target's bias for labels is learned."""
    outline: str
    """Instruction for writing an outline, which also precedes each point."""
    point: str
    """Request for one point, with the placeholders ``{number}`` and ``{title}``."""


def decision(table: dict[str, Any], labels: dict[str, str], shots: dict[str, list[str]]) -> str:
    """The instruction for naming a form, with examples in which the forms take turns."""
    rounds = [list(zip(KINDS, some, strict=True)) for some in zip(*(shots[kind] for kind in KINDS), strict=True)]
    ask, opening = str(table["ask"]), str(table["opening"])
    examples = [f"{ask.format(question=shot)}\n{opening} {labels[kind]}" for one in rounds for kind, shot in one]
    return "\n\n".join([str(table["decide"]).strip(), *examples])


@cache
def guides() -> dict[str, Guide]:
    """All guides, by language."""
    return {file.stem: read_guide(file) for file in sorted(GUIDES.glob("*.toml"))}


def read_guide(file: Path) -> Guide:
    table = tomllib.loads(file.read_text(encoding="utf-8"))
    labels, shots = table.pop("labels"), table.pop("shots")
    table["decide"] = decision(table, labels, shots)
    texts: dict[str, Any] = {name: text.strip() if isinstance(text, str) else text for name, text in table.items()}
    texts["code_words"] = table["code_words"].split()
    texts["words"] = frozenset(WORD.findall(str(texts).lower()))
    return Guide(language=file.stem, labels=labels, **texts)


def guide_for(question: str) -> Guide:
    """The guide of the language with most of the question's words; English where none has any."""
    words = Counter(WORD.findall(question.lower()))
    found = {name: sum(words[word] for word in guide.words) for name, guide in guides().items()}
    # Among equals English wins.
    best = max(found, key=lambda name: (found[name], name == DEFAULT))
    return guides()[best if found[best] else DEFAULT]
