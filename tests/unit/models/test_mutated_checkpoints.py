"""A checkpoint with any of its JSON files changed either opens or is refused, and soon."""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.load.attacking.checkpoints import FIELDS, FILES, NEW_FILES, open_all
from benchmarks.load.attacking.mutations import mutate
from penstock.core import ConfigError
from tests.checkpoints import make_checkpoint

SOON = 20.0
"""Seconds. A sound one takes a fifth of one; whatever the files make loop or fill the memory takes far longer."""


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("sound"), tokenizer=True, max_shard_size="60KB")


def test_it_opens_as_it_is(sound: Path) -> None:
    open_all(sound)


@settings(
    max_examples=settings().max_examples * 3 // 2,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_any_change_is_refused_or_does_not_matter(sound: Path, tmp_path: Path, data: st.DataObject) -> None:
    folder = tmp_path / "mutated"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(sound, folder)

    def choose(options: Sequence[Any], what_for: str) -> Any:
        return data.draw(st.sampled_from(options), what_for)

    for _ in range(data.draw(st.integers(1, 3), "changes")):
        file = folder / data.draw(st.sampled_from(FILES + NEW_FILES), "file")
        content = json.loads(file.read_text()) if file.is_file() else {}
        file.write_text(json.dumps(mutate(content, FIELDS, choose)))
    begin = time.monotonic()
    with contextlib.suppress(ConfigError):
        open_all(folder)
    assert time.monotonic() - begin < SOON
