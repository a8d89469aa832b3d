"""The pages of docs/reference that scripts write are what they write, and the one on the environment is complete."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts import cli_docs, metrics_docs, names_docs

ROOT = Path(cli_docs.__file__).parents[1]


@pytest.mark.parametrize(
    ("file", "page", "script"),
    [
        (cli_docs.PAGE, cli_docs.page, "scripts/cli_docs.py"),
        (metrics_docs.PAGE, metrics_docs.page, "scripts/metrics_docs.py"),
        (names_docs.PAGE, names_docs.page, "scripts/names_docs.py"),
    ],
    ids=["cli", "metrics", "names"],
)
def test_the_page_is_what_its_script_writes(file: Path, page: Callable[[], str], script: str) -> None:
    assert file.read_text(encoding="utf-8") == page(), f"run python {script}"


def test_no_page_has_a_written_part_twice() -> None:
    """A script writes the first part of that name; a second one, as a merge may leave it, would grow old."""
    for page in (ROOT / "docs").rglob("*.md"):
        marks = re.findall(r"<!-- [\w -]+: written by .*-->", page.read_text(encoding="utf-8"))
        assert len(marks) == len({*marks}), page


def test_every_command_and_option_is_there() -> None:
    page = cli_docs.page()
    assert "## `penstock bench serve`" in page
    assert "| `--pipeline-parallel-size`, `-pp` |" in page
    assert "Environment: `PENSTOCK_API_KEY`." in page
    assert "| `--max-tokens` | `128` |" in page


def test_variables_that_the_package_reads_are_explained() -> None:
    """Variables are found as ``os.environ.get("X")``, ``os.environ["X"]``, and options' ``envvar``."""
    sources = "\n".join(file.read_text(encoding="utf-8") for file in (ROOT / "penstock").rglob("*.py"))
    read = set(re.findall(r"(?:environ(?:\.get\(|\[)|_VARIABLE: Final = )\"([A-Z_]+)\"", sources))
    assert {"PENSTOCK_DEBUG", "PENSTOCK_API_KEY"} <= read
    page = (ROOT / "docs" / "reference" / "environment.md").read_text(encoding="utf-8")
    assert [name for name in sorted(read) if f"`{name}`" not in page] == []
