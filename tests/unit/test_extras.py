"""All missing packages are named at once, with a command that installs them beside this Python."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

import penstock
from penstock import environment
from penstock.core import ConfigError
from penstock.environment import CURVES, PLOTS, TRAINING_NEED, Need, require

ROOT: Final = Path(penstock.__file__).parents[1]
OPTIONAL: Final = {
    "penstock.hosts.listing": "zeroconf",
    "penstock.hosts.ray": "ray",
    "penstock.ray_serve.application": "ray",
    "penstock.ray_serve.policies": "ray",
}
"""Modules that begin with the import of an extra's package, and so are themselves imported where they are needed."""
EXTRAS: Final = {"zeroconf", "ray", "matplotlib", "accelerate", "xllamacpp", *OPTIONAL}


def lacking(monkeypatch: pytest.MonkeyPatch, *packages: str) -> None:
    monkeypatch.setattr(environment, "find_spec", lambda package: None if package in packages else package)


def test_what_is_there_is_not_asked_for() -> None:
    require([PLOTS, Need("tests need", "pytest", "dev")])


def test_all_that_is_missing_is_in_one_command(monkeypatch: pytest.MonkeyPatch) -> None:
    lacking(monkeypatch, "matplotlib", "accelerate")
    with pytest.raises(ConfigError) as raised:
        require([TRAINING_NEED, CURVES, PLOTS, TRAINING_NEED])
    said = "training needs accelerate and training's curves need matplotlib and plots need matplotlib: "
    assert str(raised.value).startswith(f"{said}{sys.executable} -m pip install ")
    assert re.search(r"install 'accelerate>=[\d.]+' 'matplotlib>=[\d.]+'$", str(raised.value))


def test_an_environment_without_pip_is_uvs(monkeypatch: pytest.MonkeyPatch) -> None:
    lacking(monkeypatch, "matplotlib", "pip")
    with pytest.raises(ConfigError, match=rf"uv pip install --python {re.escape(sys.executable)} 'matplotlib>="):
        require([PLOTS])


def imported_at_once(source: str) -> Iterator[str]:
    """The modules that a module imports as it begins, and the packages that they are in."""
    for node in ast.parse(source).body:
        names = [one.name for one in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
        if isinstance(node, ast.ImportFrom):
            names = [str(node.module), *(f"{node.module}.{name}" for name in names)]
        yield from (name if name in OPTIONAL else name.partition(".")[0] for name in names)


def test_nothing_that_an_extra_brings_is_imported_without_need() -> None:
    """An installation without extras has every command: `penstock worker` needs no zeroconf."""
    for file in sorted((ROOT / "penstock").rglob("*.py")):
        module = ".".join(file.relative_to(ROOT).with_suffix("").parts)
        found = EXTRAS & set(imported_at_once(file.read_text(encoding="utf-8")))
        assert found == ({OPTIONAL[module]} if module in OPTIONAL else set()), module


def test_what_is_imported_at_once() -> None:
    source = "import ray.util\nfrom penstock.hosts import ray\ndef f():\n    import zeroconf\n"
    assert EXTRAS & set(imported_at_once(source)) == {"ray", "penstock.hosts.ray"}
