"""Strategies with options in brackets: what they come to, and what is refused."""

from __future__ import annotations

import pytest

from penstock.config import FieldError
from penstock.drafters.learned import SmallModelOptions
from penstock.lab.grid import parse_entries, split_entries, strategy_of
from penstock.strategies.pipedec import PipeDecOptions, StaticTreeOptions

SWEEP = "autoregressive, pipedec[width=16, children=8],pipedec[width=64],static_tree[tree_size=48],pipedec"


def test_commas_in_brackets_do_not_split() -> None:
    entries = split_entries(SWEEP)
    assert entries == (
        "autoregressive",
        "pipedec[width=16, children=8]",
        "pipedec[width=64]",
        "static_tree[tree_size=48]",
        "pipedec",
    )
    assert [strategy_of(entry) for entry in entries[1:4]] == ["pipedec", "pipedec", "static_tree"]
    assert split_entries(" , ") == ()


def test_an_entrys_own_options_stand_over_the_common_ones() -> None:
    common = {"method": "draft_model", "model": "demo", "children": 4}
    named = dict(parse_entries(split_entries(SWEEP), common))
    assert named["autoregressive"] is None
    found = {label: config for label, config in named.items() if config is not None}
    assert {label: config.strategy_options for label, config in found.items()} == {
        "pipedec[width=16, children=8]": PipeDecOptions(width=16, children=8),
        "pipedec[width=64]": PipeDecOptions(width=64, children=4),
        "static_tree[tree_size=48]": StaticTreeOptions(tree_size=48, children=4),
        "pipedec": PipeDecOptions(children=4),
    }
    assert {config.drafter_options for config in found.values()} == {SmallModelOptions(model="demo")}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("pipedex", "entry 'pipedex': strategy is 'pipedex'; did you mean 'pipedec'?"),
        ("pipedec[widht=3]", "entry 'pipedec[widht=3]': option 'widht' is unknown to 'pipedec'; did you mean 'width'?"),
        ("pipedec[tree_size=3]", "option 'tree_size' is unknown to 'pipedec'"),
        ("autoregressive[width=3]", "option 'width' is unknown to 'autoregressive'; Known: none"),
        ("pipedec[width=0]", "entry 'pipedec[width=0]': width is 0; it has to be above 0"),
        ("pipedec[width=wide]", "entry 'pipedec[width=wide]': width is a string ('wide'); expected an integer"),
        ("pipedec[width=1.5]", "width is a number (1.5); expected an integer"),
        ("pipedec[width]", "option 'width' has no value; write width=..."),
        ("pipedec[width=]", "option 'width' has no value"),
        ("pipedec[width=1,width=2]", "option 'width' is set twice"),
        ("pipedec[width=1", "write the options as pipedec[option=value,...]"),
        ("pipedec]", "write the options as pipedec[option=value,...]"),
        ("pipedec[]", "write the options as pipedec[option=value,...]"),
        ("pipedec @ last-stage", "say with drafter_on where the drafter runs"),
        ("pipedec[width=1]x", "write the options as pipedec[option=value,...]"),
    ],
)
def test_what_cannot_be_is_refused_by_entry_and_option(text: str, words: str) -> None:
    with pytest.raises(FieldError) as refused:
        parse_entries(split_entries(f"static_tree,{text}"), {})
    assert str(refused.value).startswith("strategies entry ")
    assert words in str(refused.value)


def test_a_common_option_has_to_belong_to_one_of_the_strategies() -> None:
    with pytest.raises(FieldError, match="tree_size"):
        parse_entries(("pipedec", "pipedec[width=3]"), {"tree_size": 8})
    with pytest.raises(FieldError, match="means nothing to strategy 'autoregressive'"):
        parse_entries(("autoregressive",), {"width": 8})


def test_a_label_says_the_strategy_wherever_the_drafter_ran() -> None:
    for label in ("pipedec", "pipedec[width=3]", "pipedec @ last-stage", "pipedec[width=3] @ board-4"):
        assert strategy_of(label) == "pipedec"
