"""Has one model answer questions twice: plainly and in points."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.bench.prompts import prompt_lines, turns_of
from penstock.core import RequestOutput, SamplingParams
from penstock.engine.llm import LLM


@dataclass(frozen=True)
class Question:
    """One question. ``category`` is the file's stem, followed by the entry's own category if it has one."""

    category: str
    text: str


@dataclass(frozen=True)
class Answered:
    """A question, its prompt's token ids, and its answers; ``points`` is None where the model wrote no outline."""

    question: Question
    prompt: Sequence[int]
    plain: str
    points: str | None


def questions_of(files: Sequence[Path], per_category: int) -> list[Question]:
    """The first ``per_category`` questions of each category. Raises ConfigError naming file, line and field."""
    return [question for file in files for question in questions_in(file, per_category)]


def questions_in(file: Path, per_category: int) -> Iterator[Question]:
    seen: Counter[str] = Counter()
    for where, line in prompt_lines(file):
        turns = turns_of(line, where)
        own = json.loads(line).get("category")
        category = f"{file.stem}: {own}" if isinstance(own, str) and own else file.stem
        seen[category] += 1
        if seen[category] <= per_category:
            yield Question(category, turns[0])


def answered(llm: LLM, questions: Sequence[Question], max_tokens: int, outline_decoding: str) -> list[Answered]:
    """Every question's answers, decoded greedily, plainly and in points."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    conversations = [[{"role": "user", "content": question.text}] for question in questions]
    plain = llm.chat(conversations, params)
    outlined = llm.chat(conversations, params, outline_decoding=outline_decoding)
    return [
        Answered(question, one.prompt_token_ids, one.outputs[0].text, points_of(other))
        for question, one, other in zip(questions, plain, outlined, strict=True)
    ]


def points_of(output: RequestOutput) -> str | None:
    return output.outputs[0].text if output.outline is not None and output.outline.used else None
