"""Options that ``penstock bench quality`` refuses, and the questions that it takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.config import FieldError
from penstock.lab.quality import QualityOptions, RatedQuestion, questions_of


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"prompts": ()}, "prompts is (); it has to be at least one file"),
        ({"num_prompts": 0}, "num_prompts is 0"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"outline_decoding": "off"}, "outline_decoding is 'off'; it has to be on or auto"),
        ({"judge": "gopher://x"}, "judge is 'gopher://x'; it has to begin with http:// or https:// and a host"),
        ({"judge_model": "m"}, "judge_model is 'm'; it has to be left out where there is no judge"),
        ({"json": Path("/nowhere/x.json")}, "json is '/nowhere/x.json'; it has to be a file in a folder that exists"),
    ],
)
def test_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(FieldError) as refused:
        QualityOptions(**{"prompts": (Path("q.jsonl"),), **given})
    assert str(refused.value).startswith(said)


def test_the_first_questions_of_each_category_are_asked(tmp_path: Path) -> None:
    entries: list[dict[str, Any]] = [
        {"turns": ["one", "then"], "category": "maths"},
        {"turns": ["two"], "category": "maths"},
        {"turns": ["three"], "category": "maths"},
        {"prompt": "four"},
        {"prompt": "five", "category": ""},
    ]
    (tmp_path / "set.jsonl").write_text("\n".join(map(json.dumps, entries)))
    assert questions_of([tmp_path / "set.jsonl"], 2) == [
        RatedQuestion("set: maths", "one"),
        RatedQuestion("set: maths", "two"),
        RatedQuestion("set", "four"),
        RatedQuestion("set", "five"),
    ]
