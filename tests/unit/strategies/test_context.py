"""Strategies only read the estimates that they are given: the loop alone records."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

import penstock
from tests.contexts import context

ROOT = Path(penstock.__file__).parent


def recorders(tree: ast.AST) -> Iterator[str]:
    """The methods of estimates that take something in, wherever they are named."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (node.attr == "record" or node.attr.startswith("record_")):
            yield node.attr


def test_a_context_is_never_changed() -> None:
    told = context()
    with pytest.raises(FrozenInstanceError):
        told.now = 1.0  # type: ignore[misc]
    with pytest.raises(AttributeError):
        told.load.rows = 1  # type: ignore[misc]


def test_what_reads_estimates_records_nothing() -> None:
    readers = [
        *sorted((ROOT / "strategies").glob("*.py")),
        ROOT / "engine" / "scheduler.py",
    ]
    assert {file.name: list(recorders(ast.parse(file.read_text(encoding="utf-8")))) for file in readers} == {
        file.name: [] for file in readers
    }


def test_this_test_sees_what_records() -> None:
    loop = ast.parse((ROOT / "engine" / "loop.py").read_text(encoding="utf-8"))
    assert {"record_draft", "record_result", "record_entered", "record_hits", "record_pick"} <= set(recorders(loop))
