"""Formats numbers for tables, and tables as Markdown."""

from __future__ import annotations

from collections.abc import Sequence


def share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def length(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def bounds(interval: Sequence[float] | None) -> str:
    return "-" if interval is None else f"{interval[0]:.2f}-{interval[1]:.2f}"


def markdown(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; headings lose their line breaks."""
    joined = [heading.replace("-\n", "").replace("\n", " ") for heading in headings]
    lines = [joined, ["---", *["---:"] * (len(headings) - 1)], *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
