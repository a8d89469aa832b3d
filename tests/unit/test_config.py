"""Typed configuration: every refusal names the field, and what passes comes through unchanged."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config import (
    FieldError,
    SpeculativeConfig,
    check_positive,
    parse,
    parse_speculative,
    parse_speculative_for,
    read_toml,
)
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
        ({"name": "b", "wheels": [{"size": float("inf")}]}, "wheels[0].size", "is inf; it has to be above 0"),
        ([], "configuration", "is a list ([]); expected a table"),
    ],
)
def test_parse_names_field_and_problem(table: Any, path: str, words: str) -> None:
    error = refusal(table)
    assert error.field == path
    assert words in error.problem
    assert isinstance(error, ConfigError)


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


# ------------------------------------------------------------------------------------------------------ speculation


def test_defaults_are_prompt_lookup_and_auto() -> None:
    assert parse_speculative({}) == SpeculativeConfig(method="ngram", strategy="auto")
    assert parse_speculative({"strategy": "pipedec"}).width == 32
    assert parse_speculative({"strategy": "flowspec"}).tree_size == 80
    assert parse_speculative({"strategy": "flowspec"}).width is None


@pytest.mark.parametrize(
    "table",
    [
        {"method": "draft_model", "model": "folder", "width": 8, "children": 4},
        {"method": "ngram", "strategy": "static_tree", "tree_size": 16, "tree_depth": 3, "children": 2},
        {"method": "synthetic", "accuracy": [0.5, 0.5, 1], "seed": 3},
        {"prompt_lookup_max": 2, "prompt_lookup_min": 2},
        {"strategy": "autoregressive"},
        {"method": "spd", "feature_lag": 1, "post_state": True, "strategy": "pipedec"},
        {"method": "early_exit", "model": "folder"},
    ],
)
def test_options_of_their_method_and_strategy_pass(table: dict[str, Any]) -> None:
    config = parse_speculative(table)
    for key, value in table.items():
        assert getattr(config, key) == (tuple(value) if isinstance(value, list) else value)


@pytest.mark.parametrize(
    ("table", "path", "words"),
    [
        ({"method": "ngramm"}, "method", "did you mean 'ngram'?"),
        ({"strategy": "pipdec"}, "strategy", "did you mean 'pipedec'?"),
        ({"strategy": 1}, "strategy", "expected one of 'auto'"),
        ({"widht": 8}, "widht", "did you mean 'width'?"),
        ({"width": "8"}, "width", "expected an integer"),
        ({"width": 0}, "width", "above 0"),
        ({"children": -1}, "children", "above 0"),
        ({"strategy": "static_tree", "tree_size": 0}, "tree_size", "above 0"),
        ({"prompt_lookup_max": 2, "prompt_lookup_min": 3}, "prompt_lookup_min", "at most prompt_lookup_max, 2"),
        ({"method": "draft_model"}, "model", "needs the small model's folder"),
        ({"method": "synthetic"}, "accuracy", "needs it, for example"),
        ({"method": "synthetic", "accuracy": []}, "accuracy", "between 0 and 1"),
        ({"method": "synthetic", "accuracy": [0.5, 0.4]}, "accuracy", "none below the one before it"),
        ({"method": "synthetic", "accuracy": [0.5, 1.4]}, "accuracy", "between 0 and 1"),
        ({"method": "synthetic", "accuracy": [float("nan")]}, "accuracy", "between 0 and 1"),
        ({"method": "synthetic", "accuracy": [0.5], "seed": -1}, "seed", "0 or above"),
        ({"model": "folder"}, "model", "belongs to method 'draft_model', not 'ngram'; remove it or set method"),
        ({"method": "draft_model", "model": "f", "seed": 1}, "seed", "belongs to method 'synthetic'"),
        ({"tree_size": 8}, "tree_size", "belongs to strategy 'flowspec' or 'static_tree', not strategy 'auto'"),
        ({"strategy": "static_tree", "width": 8}, "width", "or use tree_size, tree_depth, children"),
        ({"strategy": "autoregressive", "width": 8}, "width", "not strategy 'autoregressive'; remove it"),
        ({"strategy": "autoregressive", "method": "ngram"}, "method", "drafts nothing; remove it"),
        ({"method": "spd", "feature_lag": -1}, "feature_lag", "0 or above"),
        ({"method": "eagle3", "feature_lag": 1}, "feature_lag", "belongs to method 'spd', not 'eagle3'"),
        ({"method": "early_exit", "strategy": "static_tree"}, "strategy", "with method 'early_exit' a token has to"),
        ({"method": "spd", "post_state": True, "strategy": "flowspec"}, "strategy", "with post_state a token has to"),
        ({"num_speculative_tokens": 5}, "num_speculative_tokens", "remove it or use width, children"),
        (
            {"strategy": "static_tree", "num_speculative_tokens": 5, "tree_depth": 5},
            "num_speculative_tokens",
            "another name of tree_depth",
        ),
    ],
)
def test_speculative_refusals_name_the_field(table: dict[str, Any], path: str, words: str) -> None:
    with pytest.raises(FieldError) as caught:
        parse_speculative(table)
    assert caught.value.field == path
    assert words in caught.value.problem


def test_num_speculative_tokens_is_the_depth_of_a_static_tree() -> None:
    assert parse_speculative({"strategy": "static_tree", "num_speculative_tokens": 5}).tree_depth == 5


def test_several_strategies_share_a_drafter() -> None:
    table = {"method": "draft_model", "model": "folder", "width": 8, "tree_size": 16, "children": 4}
    plain, layered, tree = parse_speculative_for(table, ["autoregressive", "pipedec", "static_tree"])
    assert (plain.strategy, layered.strategy, tree.strategy) == ("autoregressive", "pipedec", "static_tree")
    assert (layered.width, tree.tree_size, tree.model) == (8, 16, "folder")


@pytest.mark.parametrize(
    ("table", "strategies", "path"),
    [
        ({"strategy": "pipedec"}, ["pipedec", "static_tree"], "strategy"),
        ({"tree_size": 8}, ["pipedec", "autoregressive"], "tree_size"),
        ({}, ["pipedec", "magic"], "strategy"),
    ],
)
def test_refusals_for_several_strategies(table: dict[str, Any], strategies: list[str], path: str) -> None:
    with pytest.raises(FieldError) as caught:
        parse_speculative_for(table, strategies)
    assert caught.value.field == path
