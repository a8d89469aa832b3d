"""The questions of a bench, and their order."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.config import FieldError
from penstock.core import RequestError, SamplingParams
from penstock.lab.grid import BenchOptions, Question, Setting, check_lengths, conversations_of, parse_temperatures
from penstock.lab.plan_choices import PlanOptions
from penstock.lab.quality import QualityOptions
from penstock.lab.serving_load import ServingOptions
from penstock.lab.simulate import SimulateOptions

SETS: dict[str, list[tuple[str, ...]]] = {"chat": [("a", "x"), ("b",)], "code": [("c",)]}
PARAMS = SamplingParams(seed=10, max_tokens=8)


def asked(seeds: int, seeds_at_zero: int = 1) -> list[Question]:
    return [one.opening for one in conversations_of(SETS, [0.0, 1.0], seeds, PARAMS, seeds_at_zero)]


def test_sets_and_temperatures_take_turns_and_seeds_come_outermost() -> None:
    found = [(str(question.setting), question.prompt, question.params.seed) for question in asked(2)]
    assert found == [
        ("chat, T = 0", "a", 10),
        ("chat, T = 1", "a", 10),
        ("code, T = 0", "c", 10),
        ("code, T = 1", "c", 10),
        ("chat, T = 0", "b", 11),
        ("chat, T = 1", "b", 11),
        ("chat, T = 1", "a", 12),
        ("code, T = 1", "c", 11),
        ("chat, T = 1", "b", 13),
    ]
    assert all(question.params.max_tokens == 8 for question in asked(2))


def test_greedy_questions_are_repeated_where_the_seed_changes_the_drafts() -> None:
    greedy = [question for question in asked(3, seeds_at_zero=3) if question.setting == Setting("chat", 0.0)]
    assert sorted(question.params.seed or 0 for question in greedy) == [10, 11, 12, 13, 14, 15]


def test_a_prompt_is_known_by_its_text() -> None:
    questions = asked(1)
    assert questions[0].prompt_sha256 == questions[1].prompt_sha256 != questions[2].prompt_sha256
    assert len(questions[0].prompt_sha256) == 16


def test_temperatures_are_numbers_with_commas() -> None:
    assert parse_temperatures("0,0.6, 1") == (0.0, 0.6, 1.0)
    with pytest.raises(FieldError, match=r"temperature is '0,warm'"):
        parse_temperatures("0,warm")
    with pytest.raises(RequestError, match="temperature is -1"):
        conversations_of(SETS, [-1.0], 1, PARAMS, 1)


def test_a_prompt_that_does_not_fit_is_refused_by_set_and_number() -> None:
    llm: Any = SimpleNamespace(
        setup=SimpleNamespace(max_model_len=10), get_tokenizer=lambda: SimpleNamespace(encode=list)
    )
    check_lengths(llm, asked(1))
    _, long = conversations_of({"chat": [("a",), ("b" * 3,)]}, [0.0], 1, PARAMS, 1)
    with pytest.raises(FieldError, match="prompt 2 of chat and max_tokens 8 exceed max_model_len 10"):
        check_lengths(llm, [long.opening])
    later = long.question(1, {"prompt": "b", "prompt_token_ids": [1, 2, 3]})
    with pytest.raises(FieldError, match="prompt 2 of chat, turn 2 and max_tokens 8"):
        check_lengths(llm, [later])


@pytest.mark.parametrize(
    ("kind", "name", "others"),
    [
        (BenchOptions, "json", {}),
        (PlanOptions, "output", {"cluster": "demo"}),
        (QualityOptions, "json", {"prompts": (Path("q.jsonl"),)}),
        (QualityOptions, "answers", {"prompts": (Path("q.jsonl"),)}),
        (ServingOptions, "json", {}),
        (ServingOptions, "plot", {"concurrency": (1, 2)}),
        (SimulateOptions, "json", {"clusters": ("demo",)}),
    ],
)
def test_a_folder_is_no_file_to_write(kind: type[Any], name: str, others: dict[str, Any], tmp_path: Path) -> None:
    (folder := tmp_path / "folder.toml").mkdir()
    assert kind(**others, **{name: tmp_path / "new.toml"})
    for place in (folder, tmp_path / "none" / "new.toml"):
        with pytest.raises(FieldError, match=f"^{name} is .*; it has to be a file in a folder that exists"):
            kind(**others, **{name: place})
