"""Outlines: what the grammar allows, and what is read out of a text."""

from __future__ import annotations

import re

import pytest

from penstock.outlines.steps import MOST, grammar, titles_of


def text_of(*titles: str) -> str:
    return "\n".join(f"{number}. {title}" for number, title in enumerate(titles, 1))


def allows(text: str) -> bool:
    return re.fullmatch(str(grammar().regex), text) is not None


def test_titles_are_read_in_order_and_each_once() -> None:
    assert titles_of(text_of("Less noise", "Clean air", "less Noise", "Shade")) == ["Less noise", "Clean air", "Shade"]


@pytest.mark.parametrize(
    "text",
    ["", "1. Only one", text_of("Same", "same"), "2. Second\n3. Third", "1. First\n3. Third", "1. First\nno number"],
)
def test_what_is_no_outline_of_two_different_points_has_none(text: str) -> None:
    assert titles_of(text) == []


def test_the_grammar_allows_outlines_of_two_points_and_more_and_nothing_else() -> None:
    titles = [f"Point {letter}" for letter in "abcdefghi"]
    for count in range(2, MOST + 1):
        assert allows(text_of(*titles[:count]))
        assert titles_of(text_of(*titles[:count])) == titles[:count]
    for wrong in (
        text_of(titles[0]),
        text_of(*titles[: MOST + 1]),
        text_of("First", "**Bold**"),
        text_of("First", "A sentence. And another"),
        text_of("First", "x" * 80),
    ):
        assert not allows(wrong)
