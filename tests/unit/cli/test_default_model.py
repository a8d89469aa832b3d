"""The default model is said; another one takes its place only where a person says so."""

from __future__ import annotations

from typing import Any

import pytest
import typer

from penstock.cli import engine_args
from penstock.cli.engine_args import NamedModel, stand_in
from penstock.cli.lab import Benching, Judging, Training
from penstock.cli.run import ChattedModel, ServedModel
from penstock.core import PenstockError
from penstock.lab import demo
from penstock.lab.grid import BenchOptions
from penstock.library.download import Unreachable
from penstock.library.names import DEFAULT

prepared = engine_args.prepared  # before a fixture has another in its place
GONE = Unreachable("model: 'smollm2' is nowhere", DEFAULT)


def found(name: str, fails: Exception | None = None) -> list[str]:
    """The models that options were made for, the last one those that come of it."""
    made: list[str] = []

    def make(model: str) -> str:
        made.append(model)
        return model

    def check(options: str) -> None:
        made.append(f"checked {options}")
        if fails is not None:
            raise fails

    made.append(prepared(name, make, check))
    return made


def test_every_command_has_the_same_one() -> None:
    options: tuple[Any, ...] = (NamedModel, ChattedModel, ServedModel, Benching, Judging, Training)
    assert {one.model for one in options} == {demo.DEFAULT} == {DEFAULT}
    assert BenchOptions().model == "demo", "from Python nothing is fetched that was not named"


def test_it_is_said_once_it_is_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert found(DEFAULT) == [DEFAULT, f"checked {DEFAULT}", DEFAULT]
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == "SmolLM2-135M-Instruct (smollm2), the default model; name another one with MODEL or --model\n"


def test_another_model_is_not_commented_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert found("Qwen/Qwen3-8B", GONE) == ["Qwen/Qwen3-8B", "Qwen/Qwen3-8B"]
    assert capsys.readouterr().err == ""


def test_what_is_wrong_is_all_that_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="of another kind"):
        found(DEFAULT, ValueError("of another kind"))
    with pytest.raises(Unreachable, match="the draft"):
        found(DEFAULT, Unreachable("the draft is nowhere", "draft"))
    assert capsys.readouterr().err == ""


def test_a_pipe_gets_no_other_model() -> None:
    with pytest.raises(PenstockError, match=r"'smollm2' is nowhere. 'demo' is the pair of small models") as caught:
        found(DEFAULT, GONE)
    assert not isinstance(caught.value, Unreachable)


@pytest.mark.parametrize("answer", [True, False])
def test_a_person_is_asked(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], answer: bool) -> None:
    asked: list[str] = []

    def confirm(question: str, **_: Any) -> bool:
        asked.append(question)
        return answer

    for stream in ("stdin", "stderr"):
        monkeypatch.setattr(f"penstock.cli.engine_args.sys.{stream}.isatty", lambda: True, raising=False)
    monkeypatch.setattr(engine_args.typer, "confirm", confirm)
    if answer:
        assert stand_in(GONE) == "demo"
    else:
        with pytest.raises(typer.Exit) as ended:
            stand_in(GONE)
        assert ended.value.exit_code == 1
    (question,) = asked
    assert question.startswith("Run 'demo' instead, the pair of small models")
    assert "model: 'smollm2' is nowhere" in capsys.readouterr().err
