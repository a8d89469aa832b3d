"""``penstock acceptance``: which recordings, and of which models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.lab import acceptance
from tests.unit.cli.invoke import invoke


def test_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(acceptance, "run_acceptance", lambda *given, **named: seen.append((given, named)))
    assert invoke("acceptance", "a", "b", "--json", "--draft-model", "d").exit_code == 0
    assert invoke("acceptance", "a", "--model", "m").exit_code == 0
    assert seen == [
        (((Path("a"), Path("b")), True), {"model": None, "draft_model": "d"}),
        (((Path("a"),), False), {"model": "m", "draft_model": None}),
    ]


def test_a_file_has_to_be_named() -> None:
    result = invoke("acceptance")
    assert result.exit_code == 2
    assert "Missing argument 'FILE...'" in result.stderr
