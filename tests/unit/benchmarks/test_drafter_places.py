"""Rows of the drafter's places: whose tokens and counts are compared with whose."""

from __future__ import annotations

from benchmarks.papers.drafter_places import OWN, Answer, rows

PLAIN = [[1, 2, 3], [4, 5, 6]]
COUNTS = [(2, 1, 1), (3, 2, 0)]


def repeat(ms: float, ids: list[list[int]] = PLAIN, counts: list[tuple[int, int, int]] = COUNTS) -> list[Answer]:
    """The answers to both prompts, each of which took so long."""
    return [Answer(one, count, ms) for one, count in zip(ids, counts, strict=True)]


def test_a_row_has_the_median_and_the_counts_of_all_prompts() -> None:
    free, slow = rows(OWN, {None: [repeat(5.0), repeat(9.0), repeat(6.0)], 10: [repeat(20.0)]}, PLAIN, COUNTS)
    assert (free["place"], free["mbit"], free["ms"], free["counts"]) == (OWN, None, 6.0, [5, 3, 1])
    assert (slow["mbit"], slow["ms"]) == (10, 20.0)
    assert free["same_tokens"]
    assert free["same_counts"]


def test_one_repeat_with_other_tokens_or_other_counts_is_told() -> None:
    other_ids, other_counts = [[1, 2, 3], [4, 5, 7]], [(2, 1, 1), (3, 1, 1)]
    (row,) = rows(OWN, {None: [repeat(5.0), repeat(5.0, ids=other_ids)]}, PLAIN, COUNTS)
    assert (row["same_tokens"], row["same_counts"]) == (False, True)
    (row,) = rows(OWN, {None: [repeat(5.0), repeat(5.0, counts=other_counts)]}, PLAIN, COUNTS)
    assert (row["same_tokens"], row["same_counts"]) == (True, False)
