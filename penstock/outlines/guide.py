"""Guide prompts: what the target is told before a question, in the question's language."""

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
"""Forms that an answer can have. Only the first is decoded in points."""
WORD: Final = re.compile(r"[\u3040-\u30ff\u4e00-\u9fff]|[^\W\u3040-\u30ff\u4e00-\u9fff]+")
"""A word, or a character of a language that writes without blanks."""


@dataclass(frozen=True, kw_only=True)
class Guide:
    """One language's texts. ``labels``, ``shots`` and ``samples`` go by ``KINDS``."""

    language: str
    words: frozenset[str]
    """The language's commonest, and those of its texts here: what it is told by from others."""
    code_words: list[str]
    """Words of questions that are answered by a program; a question with one of them by chance is answered plainly."""
    decide: str
    """What the target is told before it names the form of an answer; ends with examples."""
    ask: str
    """A question, as it stands there: ``{question}``."""
    opening: str
    """What the label follows."""
    labels: dict[str, str]
    """A word for each form; no two begin with the same letter."""
    samples: dict[str, list[str]]
    """Questions of each form, as many of one as of another, over which a target's liking for a label is taken out."""
    outline: str
    """What the target is told before it writes an outline, and before it writes a point."""
    point: str
    """What asks for one point: ``{number}`` and ``{title}``."""


def decision(table: dict[str, Any], labels: dict[str, str], shots: dict[str, list[str]]) -> str:
    """Directive and examples, the forms by turns."""
    rounds = [list(zip(KINDS, some, strict=True)) for some in zip(*(shots[kind] for kind in KINDS), strict=True)]
    ask, opening = str(table["ask"]), str(table["opening"])
    examples = [f"{ask.format(question=shot)}\n{opening} {labels[kind]}" for one in rounds for kind, shot in one]
    return "\n\n".join([str(table["decide"]).strip(), *examples])


@cache
def guides() -> dict[str, Guide]:
    """All there are, by language."""
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
    """The guide in whose language most of the question's words are; English where none is."""
    words = Counter(WORD.findall(question.lower()))
    found = {name: sum(words[word] for word in guide.words) for name, guide in guides().items()}
    best = max(found, key=lambda name: (found[name], name == DEFAULT))
    return guides()[best if found[best] else DEFAULT]
