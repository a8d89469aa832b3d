"""Prompt files: one JSON object a line, with ``prompt``, or ``turns`` as in the field's question.jsonl."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.core import ConfigError
from penstock.engine.options import DEMO

DEFAULT_PROMPTS = DEMO / "prompts.jsonl"

Turns = tuple[str, ...]
"""The user's messages, one after the other; an entry with ``prompt`` has one."""


def read_prompt_sets(paths: Sequence[Path], count: int) -> dict[str, list[Turns]]:
    """The first ``count`` entries of each file, by its stem. Raises ConfigError like ``read_turns``."""
    files: dict[str, Path] = {}
    for path in paths:
        if path.stem in files:
            raise ConfigError(f"prompts: {files[path.stem]} and {path} would both be called {path.stem!r}; rename one")
        files[path.stem] = path
    return {name: read_turns(path, count) for name, path in files.items()}


def read_prompts(path: Path, count: int) -> list[str]:
    """The first turn of each of the first ``count`` entries. Raises ConfigError like ``read_turns``."""
    return [turns[0] for turns in read_turns(path, count)]


def read_turns(path: Path, count: int) -> list[Turns]:
    """The first ``count`` entries. Raises ConfigError naming file, line and field."""
    return [turns_of(line, where) for where, line in prompt_lines(path)[:count]]


def prompt_lines(path: Path) -> list[tuple[str, str]]:
    """Every entry as written, after its place in words. Raises ConfigError for a file without any."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"prompts: {path} cannot be read: {error.strerror}") from error
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise ConfigError(f"prompts: {path} holds no prompt")
    return [(f"{path}, line {number}", line) for number, line in numbered]


def turns_of(line: str, where: str) -> Turns:
    try:
        entry: Any = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: is not JSON: {error}") from error
    if not isinstance(entry, dict):
        raise ConfigError(f"{where}: is not an object with a field 'prompt' or 'turns'")
    if isinstance(entry.get("prompt"), str):
        return (entry["prompt"],)
    turns = entry.get("turns")
    if isinstance(turns, list) and turns and all(isinstance(turn, str) for turn in turns):
        return tuple(turns)
    raise ConfigError(f"{where}: needs a field 'prompt' (text) or 'turns' (a list of texts)")
