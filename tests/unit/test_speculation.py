"""``speculative_config``: what its options come to, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest

from penstock.config import FieldError
from penstock.drafters.base import DRAFTERS, SyntheticOptions
from penstock.drafters.merged import NgramOptions
from penstock.engine.options import EngineOptions
from penstock.engine.resolve import DEMO_DRAFTERS
from penstock.speculation import (
    SpeculativeConfig,
    make_strategy,
    names_of,
    parse_speculative,
    parse_speculative_for,
    values_of,
)
from penstock.strategies.base import STRATEGIES, Autoregressive
from penstock.strategies.pipedec import PipeDecOptions, StaticTreeOptions


def test_defaults_are_prompt_lookup_and_auto() -> None:
    assert parse_speculative({}) == SpeculativeConfig(method="ngram", strategy="auto")
    assert parse_speculative({"strategy": "pipedec"}).strategy_options == PipeDecOptions(width=32, children=16)
    assert parse_speculative({"prompt_lookup_max": 2}).drafter_options == NgramOptions(prompt_lookup_max=2)


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
    found = {"method": config.method, "strategy": config.strategy}
    found |= values_of(config.drafter_options) | values_of(config.strategy_options)
    for key, value in table.items():
        assert found[key] == (tuple(value) if isinstance(value, list) else value)


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
        (
            {"method": "ngram", "model": "folder"},
            "model",
            "'mtp', 'peagle', 'spd', not 'ngram'; remove it or set method",
        ),
        ({"method": "draft_model", "model": "f", "seed": 1}, "seed", "belongs to method 'synthetic'"),
        ({"tree_size": 8}, "tree_size", "belongs to strategy 'flowspec' or 'static_tree', not strategy 'auto'"),
        ({"strategy": "static_tree", "width": 8}, "width", "or use tree_size, tree_depth, children"),
        ({"strategy": "autoregressive", "width": 8}, "width", "not strategy 'autoregressive'; remove it"),
        ({"strategy": "autoregressive", "method": "ngram"}, "method", "drafts nothing; remove it"),
        ({"method": "spd", "feature_lag": -1}, "feature_lag", "0 or above"),
        ({"method": []}, "method", "name one method, or one and 'ngram' beside it"),
        ({"method": ["ngram", "ngram"]}, "method", "name one method, or one"),
        ({"method": ["eagle3", "spd"]}, "method", "is ['eagle3', 'spd']; name one method, or one"),
        ({"method": ["eagle3", "ngramm"]}, "method", "did you mean 'ngram'?"),
        ({"method": ["eagle3", 3]}, "method", "expected one of"),
        ({"method": ["spd", "ngram"], "accuracy": [1]}, "accuracy", "not 'spd' and 'ngram'; remove it"),
        ({"method": ["spd", "ngram"], "prompt_lookup_min": 9}, "prompt_lookup_min", "at most prompt_lookup_max"),
        ({"method": ["early_exit", "ngram"], "strategy": "static_tree"}, "strategy", "with method 'early_exit' a"),
        ({"method": "eagle3", "feature_lag": 1}, "feature_lag", "belongs to method 'spd', not 'eagle3'"),
        ({"method": "early_exit", "strategy": "static_tree"}, "strategy", "with method 'early_exit' a token has to"),
        ({"method": "spd", "post_state": True, "strategy": "flowspec"}, "strategy", "with post_state a token has to"),
        ({"num_speculative_tokens": 5}, "num_speculative_tokens", "remove it or use width, children"),
        (
            {"method": "eagle", "parallel_drafting": True},
            "parallel_drafting",
            "as P-EAGLE's modules draft, but method is 'eagle': remove it",
        ),
        ({"method": ["ngram"], "parallel_drafting": True}, "parallel_drafting", "but method is 'ngram'"),
        ({"method": "eagle3", "parallel_drafting": 1}, "parallel_drafting", "is 1; it has to be true or false"),
        ({"method": "eagle33", "parallel_drafting": True}, "method", "is 'eagle33'; Known: "),
        ({"method": "dflash", "ahead": -1}, "ahead", "is -1"),
        (
            {"method": "eagle3", "ahead": 1},
            "ahead",
            "methods 'dflash', 'dspark', 'headrace', 'jetspec', 'peagle', not 'eagle3'",
        ),
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
    assert caught.value.field == f"speculative_config.{path}"
    assert words in caught.value.problem


@pytest.mark.parametrize(
    ("method", "methods"),
    [
        ({}, ("peagle",)),
        ({"method": "eagle3"}, ("peagle",)),
        ({"method": "peagle"}, ("peagle",)),
        ({"method": "dflash"}, ("dflash",)),
        ({"method": ["ngram", "eagle3"]}, ("peagle", "ngram")),
    ],
)
def test_parallel_drafting_is_the_name_of_a_method(method: dict[str, Any], methods: tuple[str, ...]) -> None:
    config = parse_speculative({**method, "model": "some/hub-id", "parallel_drafting": True})
    assert config.methods == methods
    plain = {"method": "eagle3", "model": "some/hub-id"}
    assert parse_speculative({**plain, "parallel_drafting": False}) == parse_speculative(plain)


def test_num_speculative_tokens_is_the_depth_of_a_static_tree() -> None:
    config = parse_speculative({"strategy": "static_tree", "num_speculative_tokens": 5})
    assert config.strategy_options == StaticTreeOptions(tree_depth=5)


def test_several_strategies_share_a_drafter() -> None:
    table = {"method": "draft_model", "model": "folder", "width": 8, "tree_size": 16, "children": 4}
    plain, layered, tree = parse_speculative_for(table, ["autoregressive", "pipedec", "static_tree"])
    assert (plain.strategy, layered.strategy, tree.strategy) == ("autoregressive", "pipedec", "static_tree")
    assert layered.strategy_options == PipeDecOptions(width=8, children=4)
    assert tree.strategy_options == StaticTreeOptions(tree_size=16, children=4)
    assert {config.drafter_options.model for config in (plain, layered, tree)} == {"folder"}
    assert [config.drafts for config in (plain, layered, tree)] == [False, True, True]


def test_further_options_leave_the_others_as_they_are() -> None:
    config = SpeculativeConfig(method="synthetic", accuracy=(0.5,), strategy="pipedec", width=8)
    more = config.with_options({"children": 4, "seed": 2})
    assert more.drafter_options == SyntheticOptions(accuracy=(0.5,), seed=2)
    assert more.strategy_options == PipeDecOptions(width=8, children=4)
    with pytest.raises(FieldError, match="belongs to strategy 'flowspec' or 'static_tree'"):
        config.with_options({"tree_size": 4})


@pytest.mark.parametrize("methods", [["ngram", "eagle3"], ("eagle3", "ngram")])
def test_prompt_lookup_drafts_beside_another_method(methods: Sequence[str]) -> None:
    config = parse_speculative({"method": methods, "model": "folder", "prompt_lookup_max": 6})
    assert (config.method, config.methods) == ("eagle3", ("eagle3", "ngram"))
    assert config.drafter_options.model == "folder"
    assert config.lookup == NgramOptions(prompt_lookup_max=6)
    more = config.with_options({"width": 8})
    assert (more.methods, more.lookup) == (config.methods, config.lookup)


def test_a_list_of_one_method_is_that_method() -> None:
    assert parse_speculative({"method": ["ngram"]}) == parse_speculative({"method": "ngram"})
    assert parse_speculative({"method": "ngram"}).lookup is None


def test_none_speculates_plainly() -> None:
    assert isinstance(make_strategy(None, 3), Autoregressive)


def test_drafters_and_strategies_share_no_options_name() -> None:
    """They stand in one table, in which each option has one meaning."""
    of_drafters = {name for kind in DRAFTERS.values() for name in names_of(kind)}
    of_strategies = {name for kind in STRATEGIES.values() for name in names_of(kind)}
    assert not of_drafters & of_strategies
    assert not (of_drafters | of_strategies) & {"method", "strategy", "num_speculative_tokens"}


@pytest.mark.parametrize(
    ("table", "strategies", "path"),
    [
        ({"strategy": "pipedec"}, ["pipedec", "static_tree"], "speculative_config.strategy"),
        ({"tree_size": 8}, ["pipedec", "autoregressive"], "speculative_config.tree_size"),
        ({}, ["pipedec", "magic"], "strategy"),
    ],
)
def test_refusals_for_several_strategies(table: dict[str, Any], strategies: list[str], path: str) -> None:
    with pytest.raises(FieldError) as caught:
        parse_speculative_for(table, strategies)
    assert caught.value.field == path


@pytest.mark.parametrize(
    ("table", "target", "expected"),
    [
        ({}, "demo", SpeculativeConfig(method="draft_model", model="demo")),
        ({"method": "draft_model"}, "demo", SpeculativeConfig(method="draft_model", model="demo")),
        ({"method": "ngram"}, "demo", SpeculativeConfig(method="ngram")),
        (
            {"method": ["draft_model", "ngram"]},
            "demo",
            SpeculativeConfig(method=("draft_model", "ngram"), model="demo"),
        ),
        ({"strategy": "autoregressive"}, "demo", SpeculativeConfig(strategy="autoregressive")),
        ({"model": "d"}, "demo", SpeculativeConfig(method="draft_model", model="d")),
        ({"model": "d"}, "m", SpeculativeConfig(method="draft_model", model="d")),
        ({}, "m", SpeculativeConfig(method="ngram")),
    ],
)
def test_who_drafts_where_it_is_left_open(table: dict[str, Any], target: str, expected: SpeculativeConfig) -> None:
    assert parse_speculative(table, target) == expected
    assert EngineOptions(model=target, speculative_config=table).speculative_config == expected


def test_other_models_have_no_draft_model_of_their_own() -> None:
    with pytest.raises(FieldError, match="model"):
        parse_speculative({"method": "draft_model"}, "m")


@pytest.mark.parametrize(
    ("table", "field"),
    [
        ({"parallel_drafting": True, "strategy": "autoregressive"}, "parallel_drafting"),
        ({"parallel_drafting": True, "method": "ngram"}, "parallel_drafting"),
        ({"num_speculative_tokens": 0, "strategy": "static_tree"}, "num_speculative_tokens"),
        ({"speculative_configs": {}}, "speculative_configs"),
    ],
)
def test_errors_name_the_option_that_was_given(table: dict[str, Any], field: str) -> None:
    with pytest.raises(FieldError) as caught:
        parse_speculative(table)
    assert caught.value.field == f"speculative_config.{field}"


@pytest.mark.parametrize("target", ["demo", "other"])
@pytest.mark.parametrize("value", [5, 0.5, None, True, [], [5], [None], [["ngram"]], {"a": 1}, [{}], "", "nothing"])
@pytest.mark.parametrize("name", ["method", "model", "strategy", "num_speculative_tokens", "parallel_drafting"])
def test_values_of_any_type_are_taken_or_refused_by_name(name: str, value: Any, target: str) -> None:
    if (name, value) in [("model", "nothing"), ("parallel_drafting", True)]:
        parse_speculative({name: value}, target)
        return
    with pytest.raises(FieldError) as caught:
        parse_speculative({name: value}, target)
    assert caught.value.field.startswith(f"speculative_config.{name}")


@pytest.mark.parametrize("method", ["draft_model", ["draft_model", "ngram"]])
def test_a_learned_drafter_is_no_draft_model(method: str | list[str]) -> None:
    folders = [file.parent for file in DEMO_DRAFTERS.glob("*/config.json")]
    assert folders
    for folder in folders:
        with pytest.raises(FieldError, match=f"the checkpoint is of kind '{folder.name}'") as caught:
            parse_speculative({"method": method, "model": str(folder)})
        assert caught.value.field == "speculative_config.method"


def test_a_strategy_is_refused_where_its_trees_are_whole_and_the_drafter_waits_for_a_stage_and_nowhere_else() -> None:
    """The page of drafters promises every strategy with every drafter, but for these."""
    needed: dict[str, dict[str, Any]] = {"ngram": {}, "mtp": {}, "synthetic": {"accuracy": [0.5]}}
    asked = [(method, needed.get(method, {"model": "m"})) for method in DRAFTERS]
    refused = set()
    for strategy, (method, given) in product(STRATEGIES, [*asked, ("spd", {"model": "m", "post_state": True})]):
        try:
            SpeculativeConfig(method=method, strategy=strategy, **given)
        except FieldError:
            refused.add((strategy, method, *given))
    waiting = [("early_exit", "model"), ("spd", "model", "post_state")]
    assert refused == {(strategy, *drafter) for strategy in ("flowspec", "static_tree") for drafter in waiting}
