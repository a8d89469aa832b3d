"""A benchmark's command: its options, the record of its figures, and their lines in the terminal.

BENCHMARK = Benchmark(__file__, "Measured on two cores, nothing emulated")
options = BENCHMARK.parser(model=str, prompts=Path, per_set=2, only=CASES).parse_args()
BENCHMARK.keep(measured(options), f"MODEL PROMPTS --per-set {options.per_set}")
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.shared.measured import store
from penstock.core import ConfigError


@dataclass(frozen=True)
class Benchmark:
    """A benchmark by its script's ``__file__``; its section has the file's name. ``how`` names its kind of figures."""

    file: str
    how: str

    @property
    def name(self) -> str:
        return Path(self.file).stem

    def command(self, given: str = "") -> str:
        """The command that is shown on the page, with what it was given."""
        return f"python -m benchmarks.{Path(self.file).parent.name}.{self.name} {given}".strip()

    def parser(self, **wanted: Any) -> argparse.ArgumentParser:
        """A parser for these arguments, described by the script's first line.

        A type makes a positional argument, and a default an option of its type. A tuple makes an option of one or more
        of its elements, all of them by default. A mapping has the keywords of ``add_argument`` themselves, and makes an
        option where it has a default.
        """
        parser = argparse.ArgumentParser(prog=self.command(), description=first_line(sys.modules["__main__"].__doc__))
        for name, value in wanted.items():
            keywords = keywords_of(value)
            flag = f"--{name.replace('_', '-')}" if "default" in keywords else name
            parser.add_argument(flag, **keywords)
        return parser

    def keep(self, figures: Any, given: str = "", commands: Sequence[str] = ()) -> None:
        """Store all figures of the section with the command, or with ``commands`` where several made them."""
        store(self.name, self.how, ([*commands] or [self.command(given)], figures))

    @contextmanager
    def refusing(self) -> Iterator[None]:
        """End the process with one line that says what is wrong, where the block raises ConfigError."""
        try:
            yield
        except ConfigError as error:
            sys.exit(f"{self.name}: error: {error}")


def first_line(docstring: str | None) -> str:
    return (docstring or "").partition("\n")[0]


def keywords_of(value: Any) -> dict[str, Any]:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, type):
        return {"type": value}
    if isinstance(value, tuple):
        return {"nargs": "+", "choices": value, "default": list(value), "type": type(value[0])}
    return {"default": value, "type": type(value)}


# ------------------------------------------------------------------------------------------------------------- terminal


def show(figures: Any, name: str = "") -> None:
    """Print figures by the names under which they are stored, those of a row in one line."""
    for line in lines(figures, name):
        print(line, flush=True)


def lines(figures: Any, name: str = "") -> Iterator[str]:
    if isinstance(figures, Mapping):
        row = {key: value for key, value in figures.items() if not holds_rows(value)}
        if row:
            yield f"{name}: ".removeprefix(": ") + ", ".join(f"{key} {said(value)}" for key, value in row.items())
        for key, value in figures.items():
            if key not in row:
                yield from lines(value, f"{name} {key}".strip())
    elif holds_rows(figures):
        for one in figures:
            yield from lines(one, name)
    else:
        yield f"{name}: {said(figures)}"


def holds_rows(value: Any) -> bool:
    return isinstance(value, Mapping) or (isinstance(value, list) and bool(value) and isinstance(value[0], Mapping))


def said(value: Any) -> str:
    if isinstance(value, list | tuple):
        return " / ".join(map(said, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)
