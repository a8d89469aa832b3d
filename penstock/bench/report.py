"""The parts that all reports share: the folder, made before anything runs, plots and settings in Markdown."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from penstock.bench.formats import markdown
from penstock.core import ConfigError

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


def cell(value: Any) -> str:
    return value if isinstance(value, str) else f"`{json.dumps(value)}`"


def settings_part(settings: Mapping[str, Any]) -> list[str]:
    """The heading and the table of the settings."""
    rows = [(f"`{key}`", cell(value)) for key, value in settings.items()]
    return ["## Settings", markdown(("setting", "value"), rows)]
