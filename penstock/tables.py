"""Tables of figures on a terminal: as many whole columns as its width has room for."""

from __future__ import annotations

from copy import copy
from typing import Final

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderResult
from rich.markup import escape
from rich.table import Column, Table
from rich.text import Text

LONGEST_NAME: Final = 24
"""Width in characters that is kept for a row's name; a longer name wraps."""
WIDE: Final = 10_000


class FiguresTable(Table):
    """A table with a column of names, then one for each kind of figure. Columns without room are left out, last first.

    A line below the table names the missing columns.
    """

    def __init__(self, names: str, *headings: str, title: str | None = None) -> None:
        super().__init__(title=title and escape(title), title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        self.add_column(names, overflow="fold")
        for heading in headings:
            self.add_column(heading, justify="right", no_wrap=True)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        count = self._fitting(console, options)
        yield from Table.__rich_console__(self._with(self.columns[:count]), console, options)
        if missing := self.columns[count:]:
            names = ", ".join(in_one_line(column) for column in missing)
            yield Text(f"Not shown in {options.max_width} columns: {names}.", style="dim")

    def _fitting(self, console: Console, options: ConsoleOptions) -> int:
        """How many columns fit, the column of names among them."""
        names = copy(self.columns[0])
        names.max_width = LONGEST_NAME
        wide = options.update(width=WIDE)
        for count in range(len(self.columns), 1, -1):
            table = self._with([names, *self.columns[1:count]])
            if Table.__rich_measure__(table, console, wide).maximum <= options.max_width:
                return count
        return 1

    def _with(self, columns: list[Column]) -> FiguresTable:
        table = copy(self)
        table.columns = columns
        return table


def in_one_line(column: Column) -> str:
    return " ".join(str(column.header).split())
