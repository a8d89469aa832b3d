"""Fixtures for tests of GGUF files."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.checkpoint import gguf as folder_module


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own for the folders that are made of files."""
    place = tmp_path / "cache"
    place.mkdir()
    monkeypatch.setattr(folder_module, "cached_assets_path", lambda *_: place)
    return place
