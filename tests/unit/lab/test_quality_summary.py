"""Quality by category."""

from __future__ import annotations

import math

import pytest
from rich.console import Console

from penstock.lab.quality import Answered, Compared, Preferred, RatedQuestion, Verdicts, report_of, summarized, table_of


def one(category: str, plain: float | None, points: float | None, verdicts: Verdicts | None = None) -> Compared:
    answered = Answered(RatedQuestion(category, "?"), [1], "plain", None if points is None else "points")
    return Compared(answered, plain, points, verdicts)


COMPARED = [
    one("a", -1.0, -2.0, Verdicts(4, 6, Preferred.POINTS)),
    one("b", -1.5, -1.5, Verdicts(None, 8, None)),
    one("a", -2.0, -2.0, Verdicts(5, 5, Preferred.NEITHER)),
    one("a", -9.0, None),
]


def test_only_questions_with_both_answers_are_compared() -> None:
    first, second, everything = summarized(COMPARED)
    assert (first.category, first.questions, first.in_points) == ("a", 3, 2)
    assert (first.plain_nats, first.points_nats) == (-1.5, -2.0)
    assert first.perplexity is not None
    assert first.perplexity.mean == pytest.approx(math.exp(0.5))
    assert (first.plain_rating, first.points_rating) == (4.5, 5.5)
    assert (first.preferred, first.unread) == ({"plain": 0, "points": 1, "neither": 1}, 0)
    assert (second.plain_rating, second.points_rating, second.unread) == (None, None, 1)
    assert (everything.category, everything.questions, everything.in_points) == ("all", 4, 3)


def test_no_answer_in_points_leaves_nothing_to_compare() -> None:
    found, _ = summarized([one("a", -1.0, None)])
    assert (found.in_points, found.plain_nats, found.perplexity) == (0, None, None)


def test_tables_and_json_have_a_judge_where_there_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    found = summarized(COMPARED)
    Console(width=200).print(table_of(found, judged=False))
    assert "1-10" not in capsys.readouterr().out
    Console(width=200).print(table_of(found, judged=True))
    out = capsys.readouterr().out
    assert "0, 1, 1" in out
    assert "1.65" in out
    categories = report_of({"model": "m"}, found, judged=True).document["categories"]
    assert [category["category"] for category in categories] == ["a", "b", "all"]
