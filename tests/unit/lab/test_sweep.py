"""Sweeps: their values, and what they make of the entries."""

from __future__ import annotations

import pytest

from penstock.config import FieldError
from penstock.lab.simulate import expanded, parse_sweep


def test_values_double() -> None:
    assert parse_sweep("stages=2..64, width=8") == {"stages": (2, 4, 8, 16, 32, 64), "width": (8,)}
    assert parse_sweep("children=3..12") == {"children": (3, 6, 12)}
    assert parse_sweep("") == {}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("stages", "axis stages is ''; write FIRST..LAST"),
        ("stages=4..2", "doubling 4 does not lead to 2; end at 4"),
        ("stages=0..2", "write FIRST..LAST"),
        ("width=8..100", "end at 64 or 128"),
        ("expand=1..2", "axis 'expand' is unknown"),
        ("width=8..16,width=2..4", "given twice"),
    ],
)
def test_what_is_no_sweep_is_refused(text: str, words: str) -> None:
    with pytest.raises(FieldError, match=f"^sweep .*{words.replace('[', '.')}"):
        parse_sweep(text)


def test_entries_take_the_options_that_they_have_and_leave_open() -> None:
    sweep = parse_sweep("stages=2..4,width=8..16,children=4")
    found = expanded(["static_tree", "pipedec[children=2]", "pipedec[width=1]"], sweep)
    assert [(base, text) for base, text, _ in found] == [
        ("static_tree", "static_tree[children=4]"),
        ("pipedec[children=2]", "pipedec[children=2,width=8]"),
        ("pipedec[children=2]", "pipedec[children=2,width=16]"),
        ("pipedec[width=1]", "pipedec[width=1,children=4]"),
    ]
    assert [settings for _, _, settings in found] == [{"children": 4}, {"width": 8}, {"width": 16}, {"children": 4}]


def test_an_axis_that_no_entry_has_open_is_refused() -> None:
    with pytest.raises(FieldError, match="sweep is 'width'; it has to be an option that one of pipedec"):
        expanded(["pipedec[width=3]"], parse_sweep("width=8..16"))
