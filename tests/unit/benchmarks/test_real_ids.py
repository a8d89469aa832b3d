"""Portions of the check of a real model's tokens add up."""

from __future__ import annotations

from typing import Any

from benchmarks.strategies.real_ids import added_up, differing, digest, ways


def portion(case: str, differ: int, left: int = 0) -> dict[str, Any]:
    """Three prompts of four tokens, with as many answers ``differ`` each way; ``left`` runs are still to be done."""
    done = [f"{strategy} over {stages}" for stages, strategy in ways()]
    return {"case": case, "prompts": 3, "answered": 12, "ways": dict.fromkeys(done[left:], differ)}


def test_portions_of_a_case_add_up() -> None:
    found = added_up({"a": portion("int8", 0), "b": portion("int8", 2), "c": portion("int4", 1)})
    assert [(one["prompts"], one["answered"]) for one in found.values()] == [(6, 24), (3, 12)]
    assert set(found["int8"]["ways"].values()) == {2}
    assert set(found["int4"]["ways"].values()) == {1}


def test_tokens_that_are_not_transformers_add_up() -> None:
    one, other = ({**portion("float32", 0), "transformers": {"others": count}} for count in (1, 4))
    assert added_up({"a": one, "b": other})["float32"]["others"] == 5


def test_a_portion_counts_once_all_of_its_runs_are_done() -> None:
    assert added_up({"a": portion("float32", 0, left=1)}) == {}


def test_answers_differ_where_a_token_does() -> None:
    answers = [[1, 2], [12], [3]]
    assert differing([*map(digest, answers)], [*map(digest, [[1, 2], [1, 2], [3]])]) == 1
