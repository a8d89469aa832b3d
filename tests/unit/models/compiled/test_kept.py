"""Machine code is kept apart for every version of its sources, and without a place to keep it there is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.models.compiled import kept


@pytest.fixture(autouse=True)
def _forgotten() -> None:
    kept.folder.cache_clear()


def test_another_version_has_another_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = kept.folder()
    assert first is not None
    assert first.parent == tmp_path / "penstock" / "compiled"
    kept.folder.cache_clear()
    assert kept.folder() == first
    kept.folder.cache_clear()
    monkeypatch.setattr(kept, "digest", lambda: "another")
    assert kept.folder() == first.parent / "another"


def test_code_is_kept_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    @kept.exact
    def doubled(number: int) -> int:
        return 2 * number

    assert doubled(21) == 42
    assert list(tmp_path.rglob("*doubled*.nbc"))


def test_nothing_is_kept_where_nothing_can_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert kept.folder() is None

    @kept.fast
    def doubled(number: float) -> float:
        return 2 * number

    assert doubled(21.0) == 42.0
