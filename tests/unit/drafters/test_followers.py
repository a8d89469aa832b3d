"""The index against a scan of the whole text."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.drafters.merged import Followers


def scanned(tokens: list[int], longest: int, shortest: int) -> dict[int, int]:
    """Return each token that followed the last ones, with its longest run; longer runs first, then later ones."""
    found: dict[int, int] = {}
    for length in range(min(longest, len(tokens) - 1), shortest - 1, -1):
        for end in range(len(tokens) - 1, length - 1, -1):
            if tokens[end - length : end] == tokens[-length:]:
                found.setdefault(tokens[end], length)
    return found


@given(
    tokens=st.lists(st.integers(0, 3), max_size=40),
    cuts=st.lists(st.integers(0, 40), max_size=3),
    longest=st.integers(1, 5),
    shortest=st.integers(1, 3),
)
def test_it_finds_what_a_scan_finds(tokens: list[int], cuts: list[int], longest: int, shortest: int) -> None:
    """The result depends neither on how the text was split into calls nor on how much is not taken in yet."""
    shortest = min(shortest, longest)
    text, bounds = Followers(longest, shortest), sorted(min(cut, len(tokens)) for cut in cuts)
    for end in bounds:
        text.extend(tokens[text.length : end])
    above = tokens[text.length :]
    found = scanned(tokens, longest, shortest)
    assert list(text.after(above, 99).items()) == list(found.items())
    assert list(text.after(above, 2).items()) == list(found.items())[:2]


def test_the_most_recent_comes_first() -> None:
    text = Followers(2, 1)
    text.extend([1, 2, 7, 1, 2, 8, 1, 2])
    assert list(text.after([], 9)) == [8, 7]
    text.extend([7, 1, 2])
    assert list(text.after([], 9)) == [7, 8]


class Watched(int):
    """A token that notes how often it is looked at."""

    looked = 0

    def __eq__(self, other: object) -> bool:
        Watched.looked += 1
        return int.__eq__(self, other)

    __hash__ = int.__hash__


def test_a_look_up_does_not_walk_over_the_text() -> None:
    """It walks neither over the text nor over the occurrences of a run that has one follower."""
    looked = []
    for length in (1_000, 10_000):
        text = Followers(3, 1)
        text.extend(Watched(i % 10) for i in range(length))
        Watched.looked = 0
        assert text.after([], 9) == {0: 3}
        looked.append(Watched.looked)
    assert looked[0] == looked[1] < 100
