"""Machine code is kept apart for every version of its sources, and without a place to keep it there is none."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from penstock.models.compiled import cache

LOOPS: Final = """
import math
import sys
from penstock.models.compiled.cache import exact, part

def adding(more):
    @part
    def inner(number):
        total = 0.0
        for at in range(number):
            BODY
        return total

    return inner

with_one, with_two = adding(1), adding(2)

@exact
def one(number):
    return with_one(number) + with_one(number + 1)

@exact
def two(number):
    return with_two(number) + with_two(number + 1)

for name in sys.argv[1:]:
    print({"one": one, "two": two}[name](20))
"""
"""Loops that call a function over different numbers: the first one that a process makes has the same number in each."""
BODY: Final = "\n            ".join(f"total = total * 0.5 + math.sin(total + {step} * at) * more" for step in range(60))
"""Too much to become a part of the loop that calls it."""


@pytest.fixture(autouse=True)
def _forgotten() -> None:
    cache.folder.cache_clear()


def test_another_version_has_another_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = cache.folder()
    assert first is not None
    assert first.parent == tmp_path / "penstock" / "compiled"
    cache.folder.cache_clear()
    assert cache.folder() == first
    cache.folder.cache_clear()
    monkeypatch.setattr(cache, "digest", lambda: "another")
    assert cache.folder() == first.parent / "another"


def test_code_is_kept_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    @cache.exact
    def doubled(number: int) -> int:
        return 2 * number

    assert doubled(21) == 42
    assert list(tmp_path.rglob("*doubled*.nbc"))


def test_two_processes_that_save_at_once_do_not_take_each_others_code(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Both look at the index before the other has written it, as when the stages of a pipeline start together."""
    one, other = (cache.OwnNames(str(tmp_path), "function", "stamp") for _ in range(2))
    with monkeypatch.context() as early:
        early.setattr(other, "_load_index", dict)
        one.save(("float32", 1), "code for float32")
        other.save(("bfloat16", 1), "code for bfloat16")
    assert other.load(("bfloat16", 1)) == "code for bfloat16"
    assert one.load(("float32", 1)) is None  # it has lost its entry: to be compiled anew
    one.save(("float32", 1), "code for float32")
    assert [file.load((form, 1)) for file in (one, other) for form in ("float32", "bfloat16")] == [
        "code for float32", "code for bfloat16",
    ] * 2  # fmt: skip


def test_code_is_kept_under_the_names_of_what_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def make(number: int) -> Callable[[int], int]:
        @cache.exact
        def times(other: int) -> int:
            return number * other

        return times  # type: ignore[no-any-return]

    assert [make(number)(7) for number in (2, 3, 2)] == [14, 21, 14]
    assert len(list(tmp_path.rglob("*times*.nbc"))) == 2
    assert not list(tmp_path.rglob("*times*.1.nbc"))


def test_code_of_two_processes_can_be_loaded_by_a_third(tmp_path: Path) -> None:
    """Numba numbers functions in each process anew, and both have compiled theirs first."""
    script = tmp_path / "loops.py"
    script.write_text(LOOPS.replace("BODY", BODY))

    def said(cache: str, *names: str) -> list[str]:
        environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path / cache), "PYTHONPATH": os.getcwd()}
        command = [sys.executable, str(script), *names]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.split()

    expected = said("kept", "one") + said("kept", "two")
    assert len(set(expected)) == 2
    assert said("kept", "one", "two") == expected
    assert said("kept", "two", "one") == expected[::-1]


def test_nothing_is_kept_where_nothing_can_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert cache.folder() is None

    @cache.exact
    def doubled(number: float) -> float:
        return 2 * number

    assert doubled(21.0) == 42.0


@pytest.mark.parametrize("refused", ["tempfile.TemporaryFile", "numba.core.caching.IndexDataCacheFile._save_data"])
def test_code_is_compiled_where_the_folder_is_there_and_takes_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, refused: str
) -> None:
    """It is another user's, or its disk is full."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    place = cache.folder()
    assert place is not None
    cache.folder.cache_clear()

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(refused, refuse)
    assert (cache.folder() is None) == ("tempfile" in refused)

    @cache.exact
    def tripled(number: float) -> float:
        return 3 * number

    assert tripled(14.0) == 42.0
    assert not [*place.rglob("*.nbc")]
