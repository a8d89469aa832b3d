"""One option: the type and the default that Typer sees, and the value that comes of what it has read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, get_args

import pytest
from typer.models import ArgumentInfo, OptionInfo

from penstock.cli.options import REQUIRED, Field, parameter_of, value_of
from penstock.config import Option

NUMBERS = Option("Numbers.", parse=lambda text: tuple(float(part) for part in text.split(",")))


class Unwritten:
    """A type that no command line can write."""


def parts(field: Field) -> tuple[Any, Any, Any]:
    """The type, the default and Typer's own description of what ``parameter_of`` makes."""
    found = parameter_of(field)
    hint, info = get_args(found.annotation)
    return hint, found.default, info


@pytest.mark.parametrize(
    ("hint", "default", "typed", "shown"),
    [
        (Annotated[int, Option("")], 4, int, 4),
        (Annotated[int, Option("")], REQUIRED, int, REQUIRED),
        (Annotated[int | None, Option("")], None, int | None, None),
        (Annotated[str | Unwritten | None, Option("")], None, str | None, None),
        (Annotated[Path | None, Option("")], None, str | None, None),
        (Annotated[tuple[Path, ...], Option("")], (Path("a"),), list[str] | None, None),
        (Annotated[tuple[str, ...] | None, Option("")], None, list[str] | None, None),
        (Annotated[tuple[str, ...], Option("")], REQUIRED, list[str], REQUIRED),
        (Annotated[tuple[float, ...], NUMBERS], (0.0, 0.6), str, "0,0.6"),
        (Annotated[tuple[float, ...], Option("", default="none", parse=float)], (), str | None, None),
        (Annotated[bool, Option("", names=("--no-web",))], True, bool, False),
        (Annotated[bool, Option("")], True, bool, True),
    ],
)
def test_type_and_default(hint: Any, default: Any, typed: Any, shown: Any) -> None:
    assert parts(Field("one", hint, default))[:2] == (typed, shown)


@pytest.mark.parametrize(
    ("name", "option", "default", "names"),
    [
        ("top_k", Option(""), 3, ()),
        ("ignore_eos", Option(""), False, ("--ignore-eos",)),
        ("caching", Option(""), True, ()),
        ("as_json", Option("", names=("--json",)), False, ("--json",)),
    ],
)
def test_names(name: str, option: Option, default: Any, names: tuple[str, ...]) -> None:
    info = parts(Field(name, Annotated[type(default), option], default))[2]
    assert isinstance(info, OptionInfo)
    declared = (*([] if info.default is ... else [info.default]), *(info.param_decls or ()))
    assert declared == names


@pytest.mark.parametrize(("words", "shown"), [(None, True), ("", False), ("a fresh one", "a fresh one")])
def test_words_for_the_default(words: str | None, shown: bool | str) -> None:
    info = parts(Field("seed", Annotated[int | None, Option("A seed.", "Sampling", default=words)], None))[2]
    assert (info.help, info.rich_help_panel, info.show_default) == ("A seed.", "Sampling", shown)


def test_a_positional_option_is_an_argument() -> None:
    field = Field("file", Annotated[Path, Option("A file.", metavar="FILE", positional=True)], REQUIRED)
    assert isinstance(parts(field)[2], ArgumentInfo)


@pytest.mark.parametrize(
    ("hint", "default", "given", "value"),
    [
        (Annotated[int, Option("")], 4, 5, 5),
        (Annotated[tuple[int, ...], Option("")], (), [1, 2], (1, 2)),
        (Annotated[tuple[float, ...], NUMBERS], (), "1,2", (1.0, 2.0)),
        (Annotated[bool, Option("", names=("--no-web",))], True, True, False),
        (Annotated[bool, Option("", names=("--no-web",))], True, False, True),
        (Annotated[bool, Option("")], True, False, False),
        (int, REQUIRED, 5, 5),
    ],
)
def test_value(hint: Any, default: Any, given: Any, value: Any) -> None:
    assert value_of(Field("one", hint, default), given) == value
