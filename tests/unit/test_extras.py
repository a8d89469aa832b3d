"""All missing packages are named at once, with a command that installs them beside this Python."""

from __future__ import annotations

import re
import sys

import pytest

from penstock import extras
from penstock.core import ConfigError
from penstock.extras import CURVES, PLOTS, TRAINING_NEED, Need, require


def lacking(monkeypatch: pytest.MonkeyPatch, *packages: str) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda package: None if package in packages else package)


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
