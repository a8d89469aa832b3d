"""Names on the pages under docs/ exist: files, modules to run; the layout has every part of the package."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import penstock
from tests import first_hour

PACKAGE = Path(penstock.__file__).parent
ROOT = PACKAGE.parent
FRONT = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")]
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), *FRONT]
WHERE = (ROOT, PACKAGE, ROOT / "docs")
"""Where a path that a page names may begin."""

PYTHON_FILE = re.compile(r"(?<![\w./-])(?:[\w-]+/)+[\w*-]+\.py\b")
FOLDER = re.compile(r"`((?:[\w-]+/)+)`")
LINK = re.compile(r"\]\((?!https?:)([^)#]+)(?:#[^)]*)?\)")
MODULE = re.compile(r"python -m ((?:benchmarks|tests|penstock)(?:\.\w+)*)")
PAGE = re.compile(r"(?<![\w/])(?<!ggml's )(docs/[\w/-]+\.(?:md|png))")
ANCHOR = re.compile(r"\]\(([\w./-]*\.md)?#([\w-]+)\)")

SERVER = ("http/", "openai/", "live/")
"""Folders that the section on the server calls by their last name."""


def named(pattern: re.Pattern[str], page: Path) -> Iterator[str]:
    yield from dict.fromkeys(pattern.findall(page.read_text(encoding="utf-8")))


def is_there(path: str) -> bool:
    return any(next(where.glob(path.rstrip("/")), None) is not None for where in WHERE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_and_folders_that_a_page_names_are_there(page: Path) -> None:
    names = [*named(PYTHON_FILE, page), *(name for name in named(FOLDER, page) if name not in SERVER)]
    assert [name for name in names if not is_there(name)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    assert [link for link in named(LINK, page) if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_into_a_page_find_their_heading(page: Path) -> None:
    links = ANCHOR.findall(page.read_text(encoding="utf-8"))
    assert [link for link in links if link[1] not in headings(page.parent / (link[0] or page.name))] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_modules_that_a_page_runs_are_there(page: Path) -> None:
    modules = [ROOT / module.replace(".", "/") for module in named(MODULE, page)]
    assert [file for file in modules if not (file.with_suffix(".py").exists() or file.is_dir())] == []


@pytest.mark.parametrize("folder", ["penstock", "benchmarks", "scripts"])
def test_pages_that_the_code_names_are_there(folder: str) -> None:
    files = (ROOT / folder).rglob("*.py")
    assert [(file.name, page) for file in files for page in named(PAGE, file) if not (ROOT / page).is_file()] == []


def test_every_command_of_readme_and_start_pages_is_in_the_first_hour_and_no_other() -> None:
    typed = {one.command for block in first_hour.BLOCKS for one in block}
    on_pages = {command for page in first_hour.PAGES for command in first_hour.commands_of(page.read_text("utf-8"))}
    assert on_pages - typed - first_hour.stands_for() == set(), "a page has a command that tests/first_hour.md lacks"
    assert first_hour.stands_for() - on_pages == set(), "no page has this command any more"


def test_the_layout_has_every_part_of_the_package() -> None:
    packages = {str(file.parent.relative_to(PACKAGE)) + "/" for file in PACKAGE.rglob("*.py") if file.parent != PACKAGE}
    modules = {file.name for file in PACKAGE.glob("*.py")} - {"__init__.py"}
    assert set(layout()) == packages | modules


def layout() -> list[str]:
    """The parts that background/architecture.md lists, in order: ``tree.py``, ``models/``, ``models/speculators/``."""
    page = (ROOT / "docs" / "background" / "architecture.md").read_text(encoding="utf-8")
    lines = page.split("## Layout\n")[1].split("```\n")[1].splitlines()[1:]
    parts: list[str] = []
    above: list[str] = []
    for line in lines:
        name = line.split()[0]
        depth = (len(line) - len(line.lstrip())) // 2
        above = [*above[:depth], name]
        parts.append("".join(above))
    return parts


def headings(page: Path) -> set[str]:
    """GitHub's anchors of a page's headings."""
    lines = page.read_text(encoding="utf-8").splitlines()
    titles = [line.lstrip("#").strip().lower() for line in lines if line.startswith("#")]
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in titles}


@pytest.mark.parametrize(
    ("text", "pattern", "found"),
    [
        ("`stage/driver.py`, docs/x.md and a/b/c.py.", PYTHON_FILE, ["stage/driver.py", "a/b/c.py"]),
        ("`bench/*.py` as /tmp/x.py", PYTHON_FILE, ["bench/*.py"]),
        ("`models/` and `server/http/`, not `/live`", FOLDER, ["models/", "server/http/"]),
        ("[a](b.md#c) [d](https://e.f) [g](../h)", LINK, ["b.md", "../h"]),
        ("    python -m benchmarks.costs.decisions 8", MODULE, ["benchmarks.costs.decisions"]),
        ("see docs/a/b.md, not x/docs/c.md nor ggml's docs/d.md", PAGE, ["docs/a/b.md"]),
        ("[a](b.md#c-d) and [e](#f)", ANCHOR, [("b.md", "c-d"), ("", "f")]),
    ],
)
def test_what_counts_as_named(text: str, pattern: re.Pattern[str], found: list[str]) -> None:
    assert pattern.findall(text) == found
