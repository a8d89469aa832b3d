"""Points that grow side by side, as one text."""

from __future__ import annotations

import random

import pytest

from penstock.core import CompletionOutput, FinishReason
from penstock.engine.completion import CompletionDelta
from penstock.engine.stream import Joined

HEADINGS = ["1. A:", "\n\n2. B:", "\n\n3. C:"]


def delta(text: str, reason: FinishReason | None = None, stop: int | str | None = None) -> CompletionDelta:
    return CompletionDelta(0, [ord(letter) for letter in text], text, None, reason, stop)


def joined(*pushed: tuple[int, CompletionDelta]) -> tuple[list[str], CompletionOutput]:
    """Return the pieces of text, taken after every push, and the whole text."""
    whole, parts, pieces = CompletionOutput(0), Joined(HEADINGS), []
    for number, new in pushed:
        parts.push(number, new)
        if (piece := parts.take()) is not None:
            pieces.append(piece.text)
            piece.add_to(whole)
    return pieces, whole


def test_a_point_is_told_as_it_grows_and_those_behind_it_once_their_turn_has_come() -> None:
    pieces, whole = joined(
        (1, delta("bb")),
        (0, delta("a")),
        (2, delta("c", FinishReason.STOP)),
        (0, delta("a", FinishReason.STOP)),
        (1, delta("b", FinishReason.STOP)),
    )
    assert pieces == ["1. A:a", "a\n\n2. B:bb", "b\n\n3. C:c"]
    assert whole.token_ids == [ord(letter) for letter in "aabbbc"]
    assert whole.finish_reason is FinishReason.STOP


@pytest.mark.parametrize("cut", [0, 1, 2])
def test_the_whole_ends_for_its_length_where_any_point_does(cut: int) -> None:
    reasons = [FinishReason.LENGTH if number == cut else FinishReason.STOP for number in range(3)]
    _, whole = joined(*((number, delta("x", reason)) for number, reason in enumerate(reasons)))
    assert whole.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("reason", "stop"), [(FinishReason.STOP, "END"), (FinishReason.ABORT, None), (FinishReason.ERROR, None)]
)
def test_a_stop_string_an_abort_and_an_error_end_the_whole_with_that_point(
    reason: FinishReason, stop: str | None
) -> None:
    _, whole = joined(
        (2, delta("c", FinishReason.STOP)), (1, delta("b", reason, stop)), (0, delta("a", FinishReason.STOP))
    )
    assert (whole.text, whole.finish_reason, whole.stop_reason) == ("1. A:a\n\n2. B:b", reason, stop)


def test_in_whatever_order_points_come_the_text_is_the_same() -> None:
    rng = random.Random(5)
    expected = "".join(heading + letter * 7 for heading, letter in zip(HEADINGS, "abc", strict=True))
    for _ in range(50):
        left = {0: 7, 1: 7, 2: 7}
        pushed = []
        while any(left.values()):
            number = rng.choice([one for one in left if left[one]])
            left[number] -= 1
            pushed.append((number, delta("abc"[number], None if left[number] else FinishReason.STOP)))
        assert joined(*pushed)[1].text == expected
