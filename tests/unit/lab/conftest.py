"""Fixtures for tests of plots."""

from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.figure import Figure


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Every figure that was saved, drawn."""
    saved: list[Figure] = []
    save = Figure.savefig

    def keep(figure: Figure, path: Path) -> None:
        save(figure, path)
        saved.append(figure)

    monkeypatch.setattr(Figure, "savefig", keep)
    return saved
