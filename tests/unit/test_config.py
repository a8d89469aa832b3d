"""Typed configuration: every refusal names the field, and what passes comes through unchanged."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config import FieldError, check_positive, parse, read_toml
from penstock.core import ConfigError


@dataclass(frozen=True, kw_only=True)
class Wheel:
    size: float
    spokes: int = 32

    def __post_init__(self) -> None:
        check_positive(self, "size", "spokes")


@dataclass(frozen=True, kw_only=True)
class Bicycle:
    name: str
    wheels: tuple[Wheel, ...] = ()
    colour: Literal["red", "green"] = "red"
    gears: int | tuple[int, ...] | None = None
    electric: bool = False
    spares: dict[str, Wheel] = field(default_factory=dict)
    bell: str | Wheel = ""


def refusal(table: Any, kind: Any = Bicycle) -> FieldError:
    with pytest.raises(FieldError) as caught:
        parse(kind, table)
    return caught.value


def test_parse_converts_lists_tables_and_numbers() -> None:
    table = {
        "name": "b",
        "wheels": [{"size": 28}, {"size": 26.5, "spokes": 36}],
        "gears": [3, 7],
        "spares": {"front": {"size": 28}},
        "bell": {"size": 1},
    }
    assert parse(Bicycle, table) == Bicycle(
        name="b",
        wheels=(Wheel(size=28.0), Wheel(size=26.5, spokes=36)),
        gears=(3, 7),
        spares={"front": Wheel(size=28.0)},
        bell=Wheel(size=1.0),
    )
    assert type(parse(Bicycle, table).wheels[0].size) is float


@pytest.mark.parametrize(
    ("table", "path", "words"),
    [
        ({"name": "b", "wheel": []}, "wheel", "did you mean 'wheels'?"),
        ({"name": "b", "wheels": [{"size": 1}, {"size": 1, "spoke": 3}]}, "wheels[1].spoke", "did you mean 'spokes'?"),
        ({"name": "b", "xyzzy": 1}, "xyzzy", "unknown; Known: name, wheels"),
        ({}, "name", "is missing"),
        ({"name": "b", "wheels": [{}]}, "wheels[0].size", "is missing"),
        ({"name": 3}, "name", "is an integer (3); expected a string"),
        ({"name": "b", "wheels": {"size": 1}}, "wheels", "is a table ({'size': 1}); expected a list"),
        ({"name": "b", "wheels": [28]}, "wheels[0]", "is an integer (28); expected a table"),
        ({"name": "b", "wheels": [{"size": "28"}]}, "wheels[0].size", "is a string ('28'); expected a number"),
        ({"name": "b", "wheels": [{"size": True}]}, "wheels[0].size", "is true or false (True); expected a number"),
        ({"name": "b", "electric": 1}, "electric", "is an integer (1); expected true or false"),
        ({"name": "b", "gears": 2.5}, "gears", "is a number (2.5); expected an integer or a list"),
        ({"name": "b", "gears": [1, "2"]}, "gears[1]", "is a string ('2'); expected an integer"),
        ({"name": None}, "name", "is nothing (None); expected a string"),
        ({"name": "b", "colour": "gren"}, "colour", "is 'gren'; did you mean 'green'? Known: red, green"),
        ({"name": "b", "colour": 4}, "colour", "expected one of 'red', 'green'"),
        ({"name": "b", "spares": {"front": {"size": 0}}}, "spares.front.size", "is 0.0; it has to be above 0"),
        ({"name": "b", "wheels": [{"size": float("inf")}]}, "wheels[0].size", "is inf; it has to be a finite number"),
        ([], "configuration", "is a list ([]); expected a table"),
    ],
)
def test_parse_names_field_and_problem(table: Any, path: str, words: str) -> None:
    error = refusal(table)
    assert error.field == path
    assert words in error.problem
    assert isinstance(error, ConfigError)


@pytest.mark.parametrize("or_zero", [False, True])
@pytest.mark.parametrize(
    ("size", "wanted"), [(-1.0, "above"), (float("nan"), "above"), (float("inf"), "a finite number")]
)
def test_a_number_is_told_what_it_is_not(size: float, wanted: str, or_zero: bool) -> None:
    with pytest.raises(FieldError, match=f"size is {size}; it has to be .*{wanted}"):
        check_positive(SimpleNamespace(size=size), "size", or_zero=or_zero)  # type: ignore[arg-type]


def test_none_stands_for_an_absent_optional() -> None:
    assert parse(Bicycle, {"name": "b", "gears": None}).gears is None


def test_read_toml_errors_name_the_file(tmp_path: Path) -> None:
    missing, broken = tmp_path / "missing.toml", tmp_path / "broken.toml"
    broken.write_text("a = 1\nb = = 2\n")
    with pytest.raises(ConfigError, match=r"missing\.toml: cannot be read: No such file"):
        read_toml(missing)
    with pytest.raises(ConfigError, match=r"broken\.toml: is not TOML: .*line 2"):
        read_toml(broken)


wheels = st.builds(Wheel, size=st.floats(0.01, 1e6), spokes=st.integers(1, 99))
bicycles = st.builds(
    Bicycle,
    name=st.text(),
    wheels=st.lists(wheels, max_size=3).map(tuple),
    colour=st.sampled_from(["red", "green"]),
    gears=st.none() | st.integers() | st.lists(st.integers(), max_size=3).map(tuple),
    electric=st.booleans(),
    spares=st.dictionaries(st.text(min_size=1), wheels, max_size=2),
    bell=st.text() | wheels,
)


@given(bicycles)
def test_what_is_written_is_read(bicycle: Bicycle) -> None:
    assert parse(Bicycle, dataclasses.asdict(bicycle)) == bicycle
