"""A benchmark's command: its arguments, the record of its figures, and their lines in the terminal."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.shared import measured
from benchmarks.shared.benchmark import Benchmark, lines
from penstock.core import ConfigError

ONE = Benchmark("/somewhere/benchmarks/costs/one.py", "Measured by hand")


def test_arguments_are_of_the_kind_of_their_defaults() -> None:
    over = {"type": int, "nargs": "+", "default": [4], "choices": (4, 8)}
    parser = ONE.parser(model=str, folder=Path, per_set=2, named="x", only=("a", "b"), stages=over)
    options = parser.parse_args(["m", "f"])
    assert (options.model, options.folder, options.per_set, options.named) == ("m", Path("f"), 2, "x")
    assert (options.only, options.stages) == (["a", "b"], [4])
    options = parser.parse_args(["m", "f", "--per-set", "3", "--only", "b", "--stages", "8", "4"])
    assert (options.per_set, options.only, options.stages) == (3, ["b"], [8, 4])


@pytest.mark.parametrize("words", [["m", "f", "--only", "c"], ["m"], ["m", "f", "--per-set", "few"]])
def test_other_arguments_are_refused(words: list[str]) -> None:
    with pytest.raises(SystemExit):
        ONE.parser(model=str, folder=Path, per_set=2, only=("a", "b")).parse_args(words)


def test_figures_are_kept_with_their_command_and_with_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "MEASURED", tmp_path)
    ONE.keep({"x": 1}, "MODEL --per-set 2")
    found = measured.stored("one")
    assert (found.how, found.figures) == ("Measured by hand", {"x": 1})
    assert found.commands == ["python -m benchmarks.costs.one MODEL --per-set 2"]
    assert found.host.keys() == {"processor", "cores", "load"}
    ONE.keep({"x": 2}, commands=["first", "second"])
    assert measured.stored("one").commands == ["first", "second"]


def test_what_is_wrong_is_told_in_one_line() -> None:
    with pytest.raises(SystemExit, match=r"^one: error: no such cluster$"), ONE.refusing():
        raise ConfigError("no such cluster")


def test_figures_of_a_row_are_in_one_line() -> None:
    rows = {"n": 4, "T=0": {"ms": 1.23456, "bounds": [0.5, 2.0]}, "runs": [{"name": "a"}, {"name": "b"}]}
    assert list(lines(rows, "spd")) == [
        "spd: n 4",
        "spd T=0: ms 1.235, bounds 0.5 / 2",
        "spd runs: name a",
        "spd runs: name b",
    ]
    assert list(lines([{"x": 1}])) == ["x 1"]
    assert list(lines(2.0, "ratio")) == ["ratio: 2"]
