"""The commands' default model, which would have to be fetched, is the shipped pair in these tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from penstock.cli import engine_args
from penstock.library.names import DEFAULT, PAIR


@pytest.fixture(autouse=True)
def nothing_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    def prepared(name: str, make: Callable[[str], Any], check: object) -> Any:
        return make(PAIR if name == DEFAULT else name)

    monkeypatch.setattr(engine_args, "prepared", prepared)
