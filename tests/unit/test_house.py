"""House rules over the source: how long a function is, how many parameters it takes, how full a folder is."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import penstock

ROOT = Path(penstock.__file__).parents[1]
HOUSES = ("penstock", "benchmarks", "scripts")
CODE = {".py", ".js", ".css", ".html"}

MOST_LINES = 60
MOST_PARAMETERS = 12
MOST_FILES = 24

Function = ast.FunctionDef | ast.AsyncFunctionDef


def code_files() -> Iterator[Path]:
    for house in HOUSES:
        yield from (file for file in sorted((ROOT / house).rglob("*")) if file.suffix in CODE)


def functions_in(source: str) -> Iterator[Function]:
    yield from (node for node in ast.walk(ast.parse(source)) if isinstance(node, Function))


def functions() -> Iterator[tuple[str, Function]]:
    """Every function with the dotted name of its module."""
    for file in code_files():
        if file.suffix == ".py":
            module = ".".join(file.relative_to(ROOT).with_suffix("").parts)
            yield from ((module, found) for found in functions_in(file.read_text(encoding="utf-8")))


def lines(function: Function) -> int:
    """From ``def`` to the last line, its decorators left out."""
    assert function.end_lineno is not None
    return function.end_lineno - function.lineno + 1


def parameters(function: Function) -> int:
    taken = function.args
    plain = len(taken.posonlyargs) + len(taken.args) + len(taken.kwonlyargs)
    return plain + (taken.vararg is not None) + (taken.kwarg is not None)


def test_functions_fit_on_a_screen() -> None:
    too_large = {
        (module, function.name)
        for module, function in functions()
        if lines(function) > MOST_LINES or parameters(function) > MOST_PARAMETERS
    }
    assert not too_large


def test_folders_can_be_read_in_a_list() -> None:
    files = Counter(file.parent for file in code_files())
    assert {str(folder.relative_to(ROOT)) for folder, count in files.items() if count > MOST_FILES} == set()


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("def f(): pass", (1, 0)),
        ("@cached\nasync def f(self, a, /, b, *rest, c=1,\n        **more):\n    pass", (3, 6)),
    ],
)
def test_what_is_counted(source: str, expected: tuple[int, int]) -> None:
    (found,) = functions_in(source)
    assert (lines(found), parameters(found)) == expected


def test_the_web_page_is_tested_in_the_file_that_make_test_page_runs() -> None:
    using = {file.name for file in (ROOT / "tests").rglob("test_*.py") if "mark.page" in file.read_text("utf-8")}
    assert using - {Path(__file__).name} == {"test_page.py"}
