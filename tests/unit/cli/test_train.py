"""``penstock train``: what its flags come to, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.lab.trainer import options as preflight
from penstock.lab.trainer import run
from penstock.lab.trainer.options import TrainOptions
from tests.unit.cli.invoke import invoke

LEAST = ("--data", "a", "--output", "o")


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[TrainOptions]:
    """The options of every ``run_train`` instead of a training."""
    options: list[TrainOptions] = []
    monkeypatch.setattr(run, "run_train", options.append)
    monkeypatch.setattr(preflight, "check_run", lambda options: None)
    return options


def test_defaults_are_those_of_the_options(seen: list[TrainOptions]) -> None:
    assert invoke("train", "eagle", *LEAST).exit_code == 0
    assert seen == [TrainOptions(kind="eagle", data=(Path("a"),), output=Path("o"))]


def test_flags(seen: list[TrainOptions]) -> None:
    flags = ["--data", "b", "--model", "m", "--max-length", "64", "--batch-tokens", "256", "--accumulate", "2"]
    flags += ["--anchors", "0,2", "--stages", "2,4", "--spec-layers", "3", "--regenerate", "--restart", "--seed", "5"]
    flags += ["--temperatures", "0,0.7"]
    assert invoke("train", "spd", *LEAST, *flags).exit_code == 0
    assert seen == [
        TrainOptions(
            kind="spd",
            data=(Path("a"), Path("b")),
            output=Path("o"),
            model="m",
            max_length=64,
            batch_tokens=256,
            accumulate=2,
            anchors=(0, 2),
            stages=(2, 4),
            spec_layers=3,
            regenerate=True,
            temperatures=(0.0, 0.7),
            restart=True,
            seed=5,
        )
    ]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("eagel", *LEAST), "kind is 'eagel'; did you mean 'eagle'?"),
        (("spd", *LEAST, "--regenerate", "--temperatures", "0,x"), "temperatures is '0,x'; it has to be a list of num"),
        (("spd", *LEAST, "--stages", "4,x"), "stages is '4,x'; it has to be a list of whole numbers"),
        (("eagle", *LEAST, "--heads", "4"), "heads belongs to medusa, not eagle; remove it"),
    ],
)
def test_refused(seen: list[TrainOptions], arguments: tuple[str, ...], said: str) -> None:
    result = invoke("train", *arguments)
    assert (result.exit_code, seen) == (2, [])
    assert result.stderr.startswith(f"penstock: error: {said}")
