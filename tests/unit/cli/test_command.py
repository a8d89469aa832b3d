"""A command of groups of options: what it can be told, what it gets, and what becomes of errors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner, Result

from penstock import ConfigError, PenstockError, PipelineError, RequestError
from penstock.cli.options import command, new_app
from penstock.config import Option


@dataclass(frozen=True, kw_only=True)
class Inner:
    depth: Annotated[int, Option("How deep.")] = 3


@dataclass(frozen=True, kw_only=True)
class Outer:
    name: Annotated[str, Option("What it is called.", names=("--name", "-n"))]
    inner: Inner = field(default_factory=Inner)
    table: Annotated[Mapping[str, int], Option("Parsed.", parse=lambda text: {text: 1})] = field(default_factory=dict)
    unseen: int = 7
    """A field without an ``Option``, which the command line does not know."""


def call(function: Callable[..., None], *arguments: str) -> Result:
    app = new_app()
    app.command()(command(function))
    return CliRunner().invoke(app, list(arguments))


def told(*arguments: str) -> dict[str, Any]:
    """Return the values that a command with every kind of parameter gets from ``arguments``."""
    seen: dict[str, Any] = {}

    def take(
        *,
        file: Annotated[str, Option("A place.", positional=True)],
        outer: Outer,
        many: Annotated[tuple[int, ...], Option("Several.")] = (5,),
        plain: Annotated[bool, typer.Option("--plain")] = False,
    ) -> None:
        seen.update(file=file, outer=outer, many=many, plain=plain)

    result = call(take, *arguments)
    assert result.exit_code == 0, result.output
    return seen


def test_what_is_not_given_is_left_to_the_groups() -> None:
    assert told("f", "--name", "a") == {"file": "f", "outer": Outer(name="a"), "many": (5,), "plain": False}


def test_what_is_given_reaches_its_group() -> None:
    seen = told("f", "-n", "a", "--depth", "4", "--table", "x", "--many", "1", "--many", "2", "--plain")
    outer = Outer(name="a", inner=Inner(depth=4), table={"x": 1})
    assert seen == {"file": "f", "outer": outer, "many": (1, 2), "plain": True}


def test_a_field_without_an_option_is_none_of_the_command() -> None:
    def take(*, outer: Outer) -> None:
        raise AssertionError("not to be called")

    assert call(take, "--name", "a", "--unseen", "8").exit_code == 2
    assert call(take).exit_code == 2, "a field without a default has to be given"


def test_two_groups_cannot_have_the_same_option() -> None:
    def take(*, one: Inner, other: Inner) -> None: ...

    with pytest.raises(ValueError, match="duplicate parameter name: 'depth'"):
        command(take)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("a field"), 2),
        (RequestError("a prompt"), 2),
        (PipelineError("a stage"), 1),
        (PenstockError("else"), 1),
    ],
)
def test_an_error_is_one_line_and_an_exit_code(error: PenstockError, code: int) -> None:
    def fail() -> None:
        raise error

    result = call(fail)
    assert (result.exit_code, result.stdout, result.stderr) == (code, "", f"penstock: error: {error}\n")


def test_an_error_while_a_group_is_made_is_told_alike() -> None:
    @dataclass(frozen=True)
    class Strict(Inner):
        def __post_init__(self) -> None:
            raise ConfigError(f"depth is {self.depth}")

    def take(*, strict: Strict) -> None: ...

    take.__annotations__["strict"] = Strict  # a local class has no name that a hint could be looked up by
    result = call(take, "--depth", "4")
    assert (result.exit_code, result.stderr) == (2, "penstock: error: depth is 4\n")


def test_ctrl_c_is_exit_code_130() -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    result = call(interrupted)
    assert (result.exit_code, result.output) == (130, "")
