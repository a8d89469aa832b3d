"""docs/reference/api.md is what its script writes, and leaves out nothing that users import."""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest

import penstock
from scripts import api_docs


def test_the_page_is_what_the_script_writes() -> None:
    assert api_docs.PAGE.read_text(encoding="utf-8") == api_docs.page(), "run python scripts/api_docs.py"


def test_everything_that_the_package_exports_has_its_entry() -> None:
    described = {entry.kind.__name__ for chapter in api_docs.CHAPTERS for entry in chapter.entries}
    assert set(penstock.__all__) <= described


def test_every_exported_class_has_an_example() -> None:
    examples = "".join(re.findall(r"```python\n(.*?)```", api_docs.page(), flags=re.DOTALL))
    assert [name for name in penstock.__all__ if not re.search(rf"\b{name}\b", examples)] == []


def test_the_package_lists_what_it_exports() -> None:
    assert dir(penstock) == sorted([*penstock.__all__, "__version__"])


def entries() -> list[pytest.param]:
    found = [entry for chapter in api_docs.CHAPTERS for entry in chapter.entries]
    return [pytest.param(entry, id=entry.kind.__name__) for entry in found]


@pytest.mark.parametrize("entry", entries())
def test_nothing_on_it_goes_without_a_word(entry: api_docs.Entry) -> None:
    assert entry.kind.__doc__
    for name in entry.methods:
        assert getattr(entry.kind, name).__doc__, name
    if entry.fields:
        assert [line for line in api_docs.fields(entry.kind) if "\n" not in line] == []


@dataclass
class Base:
    """A class with a field."""

    first: int
    """One ``number``."""


@dataclass
class Derived(Base):
    """A class that adds a field and a method."""

    second: str = "a"
    """A word."""

    def call(self, word: str, *, loud: bool = False, **more: int) -> str:
        """Says ``word``."""
        raise NotImplementedError


def test_fields_and_signatures() -> None:
    assert list(api_docs.fields(Derived)) == ["- `first: int`\n  One `number`.", "- `second: str = 'a'`\n  A word."]
    assert api_docs.signature(Derived.call, "call") == "call(word: str, *, loud: bool = False, **more: int) -> str"
