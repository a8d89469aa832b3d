"""The report of a command that measures: tables and remarks for people, and one JSON document with every figure."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, TypeVar
from urllib.parse import quote

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from penstock.core import ConfigError, __version__
from penstock.lab.common import markdown
from penstock.terminal import FiguresTable

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

# --------------------------------------------------------------------------------------------------------------- report


@dataclass(frozen=True)
class Report:
    """A command's outcome. ``document`` is written as JSON; its entry ``settings`` says how to repeat the run.

    ``headlines`` are sentences above the tables, and ``remarks`` those that a reader needs before quoting the tables.
    """

    document: Mapping[str, Any]
    tables: Sequence[Table]
    remarks: Sequence[str] = ()
    headlines: Sequence[str] = ()

    def show(self, console: Console) -> None:
        """Print headlines, tables and remarks."""
        for sentence in self.headlines:
            console.print(sentence, style="bold", highlight=False, markup=False)
        for table in self.tables:
            console.print(table)
        for line in self.remarks:
            console.print(line, highlight=False, markup=False)

    def deliver(self, console: Console, file: Path | None = None) -> None:
        """Print the report, and write its document to ``file`` if there is one."""
        self.show(console)
        if file is not None:
            file.write_text(indented(self.document), encoding="utf-8")

    def answer(self, console: Console, to: TextIO | None = None) -> None:
        """Print the report, or with ``to`` its document alone, on one line."""
        if to is None:
            self.show(console)
        else:
            to.write(json.dumps(self.document) + "\n")

    def write_folder(self, folder: Path, command: str, title: str, body: Iterable[str]) -> None:
        """Write the document, and report.md with headlines, remarks, ``body`` and settings, into an existing folder.

        ``body`` are paragraphs in Markdown. They may be drawn while they are asked for: the document is written first.
        """
        name = f"{command}.json"
        (folder / name).write_text(indented(self.document), encoding="utf-8")
        text = [
            f"# {title}",
            *(f"**{sentence}.**" for sentence in self.headlines),
            f"By `penstock {command}`; all figures, per request too, are in [{name}]({name}).",
            *("- " + line for line in self.remarks),
            *body,
            "## Settings",
            settings_table(self.document["settings"]),
        ]
        (folder / "report.md").write_text("\n\n".join(text) + "\n", encoding="utf-8")


def indented(document: Mapping[str, Any]) -> str:
    """A document as the text of a JSON file."""
    return json.dumps(document, indent=2) + "\n"


# ------------------------------------------------------------------------------------------------------------- settings


def settings_of(
    options: DataclassInstance, without: Collection[str], packages: Sequence[str] = (), **other: Any
) -> dict[str, Any]:
    """The options but those named in ``without``, with ``other`` in place of or behind them, and packages' versions."""
    shown = {one.name: getattr(options, one.name) for one in fields(options) if one.name not in without}
    return {**shown, **other, "versions": {"penstock": __version__} | {name: version(name) for name in packages}}


def this_host() -> dict[str, Any]:
    """The Python, the number of cores and the architecture of the host that a bench ran on, for its settings."""
    return {"python": platform.python_version(), "cpus": os.cpu_count(), "machine": platform.machine()}


def settings_table(settings: Mapping[str, Any]) -> str:
    rows = [(f"`{key}`", cell(value)) for key, value in settings.items()]
    return markdown(("setting", "value"), rows)


def cell(value: Any) -> str:
    return value if isinstance(value, str) else f"`{json.dumps(value)}`"


# -------------------------------------------------------------------------------------------------------------- figures

T = TypeVar("T")
Columns = Mapping[str, Callable[[T], str]]
"""The function that formats a run's figure, by heading; headings are broken into lines to keep columns narrow."""


def figures_table(
    names: str,
    title: str | None,
    columns: Columns[T],
    runs: Iterable[tuple[str, T]],
    always: frozenset[str] = frozenset(),
) -> FiguresTable:
    """A line for each of ``runs``, which are pairs of a name and a run. ``always``: see FiguresTable."""
    table = FiguresTable(names, *columns, title=title, always=always)
    for name, run in runs:
        table.add_row(escape(name), *(cell(run) for cell in columns.values()))
    return table


def figures_rows(columns: Columns[T], runs: Iterable[tuple[str, T]]) -> list[list[str]]:
    """The lines of a table in Markdown, whose names are set as code."""
    return [[f"`{name}`", *(cell(run) for cell in columns.values())] for name, run in runs]


# --------------------------------------------------------------------------------------------------------------- folder

Image = tuple[str, str]
"""A file's name in the report's folder, and its description."""


def prepare(folder: Path) -> None:
    """Make the report's folder. Raises ConfigError where that fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"report: {folder} cannot be made: {error.strerror}") from error


def shown(image: Image) -> str:
    name, words = image
    return f"![{words}]({quote(name)})"
