"""``penstock run``: what its flags come to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock import run
from penstock.engine.options import EngineOptions
from tests.unit.cli.invoke import invoke


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(run, "run", lambda *arguments: calls.append(arguments))
    return calls


def test_a_model_is_called_as_its_file(called: list[tuple[Any, ...]], tmp_path: Path) -> None:
    (template := tmp_path / "chat.jinja").write_text("{{ messages[0].content }}")
    flags = ["--system-prompt", "Be brief.", "--chat-template", str(template), "-pp", "2", "--draft-model", "d"]
    assert invoke("run", "models/small.gguf", *flags).exit_code == 0
    speculation = {"method": "draft_model", "model": "d"}
    options = EngineOptions(model="models/small.gguf", pipeline_parallel_size=2, speculative_config=speculation)
    assert called == [(options, "small", "Be brief.", "{{ messages[0].content }}")]


def test_without_a_model_it_is_that_of_all_commands(called: list[tuple[Any, ...]]) -> None:
    assert invoke("run").exit_code == 0
    assert called == [(EngineOptions(model="demo"), "demo", "", None)]


def test_what_is_wrong_is_said_before_anything_is_fetched(called: list[tuple[Any, ...]], tmp_path: Path) -> None:
    result = invoke("run", "--chat-template", str(tmp_path / "none.jinja"))
    assert result.exit_code == 2
    assert called == []
