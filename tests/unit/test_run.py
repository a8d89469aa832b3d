"""How ``penstock run`` chooses its model, and what it says beforehand."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock import run
from penstock.config import FieldError
from penstock.demo.chat_model import Unreachable
from penstock.engine.options import EngineOptions
from tests.checkpoints import make_checkpoint


def test_a_model_that_is_named_is_run() -> None:
    assert run.chosen("some/model") == "some/model"


def test_the_small_chat_model_is_announced_when_it_has_to_be_fetched(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "small.gguf"
    monkeypatch.setattr(run.chat_model, "FILE", file)
    monkeypatch.setattr(run.chat_model, "fetched", lambda: file)
    assert run.chosen("") == str(file)
    assert "Fetching SmolLM2-135M-Instruct (98 MB)" in capsys.readouterr().err
    file.touch()
    assert run.chosen("") == str(file)
    assert capsys.readouterr().err == ""


def test_the_shipped_pair_stands_in_where_nothing_can_be_fetched(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fetched() -> Path:
        raise Unreachable("no registry")

    monkeypatch.setattr(run.chat_model, "fetched", fetched)
    assert run.chosen("") == "demo"
    assert "no registry. The pair of small models that comes with Penstock is run instead." in capsys.readouterr().err


def test_what_is_no_chat_model_is_said_or_refused(tmp_path: Path) -> None:
    assert run.introduction_of(EngineOptions(), "demo", None) == [f"demo {run.CONTINUES}"]
    assert run.introduction_of(EngineOptions(), "demo", "{{ messages[0].content }}") == []
    plain = EngineOptions(model=str(make_checkpoint(tmp_path, "llama", tokenizer=True)))
    with pytest.raises(FieldError, match=r"model is 'base', which has no chat template: .*--chat-template"):
        run.introduction_of(plain, "base", None)
