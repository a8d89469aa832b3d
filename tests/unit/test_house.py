"""House rules over the source: lengths of functions and files, numbers of parameters, how docstrings begin."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

import penstock
from tests.sources import text_of, tree_of

ROOT = Path(penstock.__file__).parents[1]
HOUSES = ("penstock", "benchmarks", "scripts")
CODE = {".py", ".js", ".css", ".html"}

MOST_LINES = 60
MOST_PARAMETERS = 12
MOST_LINES_OF_A_FILE = 700
DANGLING = {"Of", "That", "By", "What", "Which", "Than", "Whose", "Whoever", "Whatever", "So", "As"}
"""Words that begin half a sentence: whoever reads one has to find the other half in the code."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


def code_files() -> Iterator[Path]:
    for house in HOUSES:
        yield from (file for file in sorted((ROOT / house).rglob("*")) if file.suffix in CODE)


def functions_in(tree: ast.Module) -> Iterator[Function]:
    yield from (node for node in statements_and_bodies(tree) if isinstance(node, Function))


def functions() -> Iterator[tuple[str, Function]]:
    """Every function with the dotted name of its module."""
    for file in code_files():
        if file.suffix == ".py":
            module = ".".join(file.relative_to(ROOT).with_suffix("").parts)
            yield from ((module, found) for found in functions_in(tree_of(file)))


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


def test_files_can_be_read_at_a_sitting() -> None:
    long = {str(file.relative_to(ROOT)): len(file.read_text("utf-8").splitlines()) for file in code_files()}
    assert {name: count for name, count in long.items() if count > MOST_LINES_OF_A_FILE} == {}


def statements_and_bodies(tree: ast.Module) -> Iterator[ast.AST]:
    """Every node but expressions, none of which holds a statement."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        waiting += (child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.expr))


def docstrings_in(tree: ast.Module) -> Iterator[str]:
    """Those of modules, classes, functions and attributes: every text that is a statement of its own."""
    for node in statements_and_bodies(tree):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else []:
            value = getattr(statement, "value", None)
            if isinstance(statement, ast.Expr) and isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield value.value


def dangles(docstring: str) -> bool:
    word = re.match(r"\W*(\w+)", docstring)
    return word is not None and word[1] in DANGLING


def test_docstrings_are_sentences() -> None:
    files = [file for house in (*HOUSES, "tests") for file in sorted((ROOT / house).rglob("*.py"))]
    found = {
        (str(file.relative_to(ROOT)), docstring.splitlines()[0])
        for file in files
        for docstring in docstrings_in(tree_of(file))
        if dangles(docstring)
    }
    assert found == set()


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ('"""Of a step."""', [True]),
        ('"""Offers."""\nclass A:\n    """A class."""\n    x = 1\n    """What x is."""', [False, False, True]),
        ('def f():\n    """``That`` is quoted."""\n    return "By the way"', [True]),
        ('"""The rest.\n\nWhat follows is not looked at."""', [False]),
    ],
)
def test_what_dangles(source: str, expected: list[bool]) -> None:
    assert [dangles(one) for one in docstrings_in(ast.parse(source))] == expected


UNITS: Final = ("_S", "_SECONDS", "_MS", "_DAYS", "_BYTES", "_BITS", "_TOKENS", "_ROWS", "_STAGES")
"""Ends of names that say what is counted."""


def undocumented(source: str, tree: ast.Module) -> Iterator[str]:
    """Names of a module's numbers that nothing explains: no docstring or comment, neither theirs nor their group's."""
    rows = source.splitlines()
    group: list[str] = []
    for statement in tree.body:
        if isinstance(statement, ast.Expr):  # the docstring of the numbers before it
            group = []
        name, above = constant_of(statement), rows[statement.lineno - 2] if statement.lineno > 1 else ""
        if not above or not isinstance(statement, ast.Assign | ast.AnnAssign):
            yield from group
            group = []
        if name and not (name.endswith(UNITS) or "#" in rows[statement.lineno - 1] or above.startswith("#")):
            group.append(name)
    yield from group


def constant_of(statement: ast.stmt) -> str | None:
    """The name that a statement gives a number, in capitals; None for any other statement."""
    if not isinstance(statement, ast.AnnAssign | ast.Assign) or statement.value is None:
        return None
    target = statement.target if isinstance(statement, ast.AnnAssign) else statement.targets[0]
    if not isinstance(target, ast.Name) or not target.id.isupper():
        return None
    values = [node for node in ast.walk(statement.value) if not isinstance(node, ast.operator | ast.unaryop)]
    numbers = [isinstance(one, ast.Constant) and type(one.value) in (int, float) for one in values]
    whole = all(
        known or isinstance(one, ast.BinOp | ast.UnaryOp | ast.Load) for known, one in zip(numbers, values, strict=True)
    )
    return target.id if whole and any(numbers) else None


def test_every_number_has_its_unit() -> None:
    files = sorted((ROOT / "penstock").rglob("*.py"))
    found = {
        (str(file.relative_to(ROOT)), name) for file in files for name in undocumented(text_of(file), tree_of(file))
    }
    assert found == set()


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("A: Final = 3", ["A"]),
        ('A: Final = 3\n"""Metres."""\nB = 1 << 3', ["B"]),
        ('A = 3\nB = -1.0\n"""Metres, the least and the most."""', []),
        ('A = 3\n\nB = 2\n"""Metres."""', ["A"]),
        ('A = 3  # metres\nWAIT_S = 2\nNAMES = ("a", 3)\nTWICE = 2 * A\nlow = 3', []),
    ],
)
def test_what_has_no_unit(source: str, expected: list[str]) -> None:
    assert list(undocumented(source, ast.parse(source))) == expected


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("def f(): pass", (1, 0)),
        ("@cached\nasync def f(self, a, /, b, *rest, c=1,\n        **more):\n    pass", (3, 6)),
    ],
)
def test_what_is_counted(source: str, expected: tuple[int, int]) -> None:
    (found,) = functions_in(ast.parse(source))
    assert (lines(found), parameters(found)) == expected


def test_a_tests_marks_stand_in_its_own_file() -> None:
    """``pytest -m`` leaves out files that never name the marker that it asks for (tests/conftest.py)."""
    marked = re.compile(r"mark\.(processes|whole|page|stacks|arm|image)\b")
    files = [file for file in (ROOT / "tests").rglob("*.py") if marked.search(file.read_text("utf-8"))]
    assert len(files) > 50
    assert [file.name for file in files if not file.name.startswith("test_")] == []


def test_the_web_page_is_tested_in_the_file_that_make_test_page_runs() -> None:
    using = {file.name for file in (ROOT / "tests").rglob("test_*.py") if "mark.page" in file.read_text("utf-8")}
    assert using - {Path(__file__).name} == {"test_page.py"}
