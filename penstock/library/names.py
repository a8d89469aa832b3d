"""The short names of models, from ``names.toml``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from penstock.config import parse, read_toml
from penstock.typos import meant

DEFAULT: Final = "smollm2"
"""The model of every command that is given none."""
FILE: Final = Path(__file__).with_name("names.toml")


@dataclass(frozen=True, kw_only=True)
class Package:
    """A Python package that holds a model's file; nothing of it is installed or run."""

    requirement: str
    member: str
    """The file's path in the package's wheel."""
    size: int
    """Bytes of the file."""
    sha256: str


@dataclass(frozen=True, kw_only=True)
class ShortName:
    """A model that has a short name; ``names.toml`` says what the fields are."""

    model: str
    pull: str
    family: str
    package: Package | None = None

    @property
    def title(self) -> str:
        """The name that people know the model by, as ``SmolLM2-135M-Instruct``."""
        return self.model.rpartition("/")[2]


@cache
def short_names() -> Mapping[str, ShortName]:
    return {name: parse(ShortName, table, name) for name, table in read_toml(FILE).items()}


def hint(typed: str) -> str:
    """The short name that ``typed`` may be a typo of, as the end of an error; empty if there is none."""
    guess = None if typed in short_names() else meant(typed, short_names())
    return f"; did you mean {guess!r}?" if guess is not None else ""
