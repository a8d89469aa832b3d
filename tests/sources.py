"""Syntax trees of source files, parsed once for all rules over them."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path


@cache
def text_of(file: Path) -> str:
    return file.read_text(encoding="utf-8")


@cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse(text_of(file))
