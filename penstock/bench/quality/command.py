"""``penstock bench quality``: compares answers in points with plain ones, by the target's likelihood and by a judge."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, fields, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import msgspec
from rich.console import Console
from rich.progress import Progress, TaskID

from penstock.bench.quality.answers import Answered, Question, answered, questions_of
from penstock.bench.quality.judge import Judge
from penstock.bench.quality.likelihood import log_likelihoods
from penstock.bench.quality.options import QualityOptions
from penstock.bench.quality.summary import CategoryQuality, Compared, as_json, summarized, table_of
from penstock.engine.llm import LLM
from penstock.engine.resolve import check_options
from penstock.progress import progress_bar

AT_ONCE: Final = 4
"""Questions that are answered together."""


def run_bench_quality(options: QualityOptions, console: Console | None = None) -> list[CategoryQuality]:
    """Answer, compare, print the table and write the files.

    Raises ConfigError before anything starts, and ServerError where the judge is not there or fails.
    """
    questions = checked(options)
    console = console or Console(stderr=True)
    judge = Judge(options.server, options.judge_model) if options.server is not None else None
    judged_by = judge.model if judge is not None else None  # first, so that a missing judge is noticed soon
    with progress_bar(console) as progress:
        task = progress.add_task("answering", total=len(questions))
        compared = compared_by_itself(options, questions, progress, task)
        if judge is not None:
            progress.update(task, description="judging", completed=0)
            with closing(judge):
                compared = [judged(judge, one, lambda: progress.advance(task)) for one in compared]
    found = summarized(compared)
    console.print(table_of(found, judged=judge is not None))
    if options.json is not None:
        options.json.write_text(as_json(settings_of(options, judged_by), found), encoding="utf-8")
    if options.answers is not None:
        write_answers(options.answers, compared)
    return found


def checked(options: QualityOptions) -> list[Question]:
    """The questions of a bench that can begin: its model is fetched if it is not here. Raises ConfigError."""
    questions = questions_of(options.prompts, options.num_prompts)
    check_options(options.engine)
    return questions


def compared_by_itself(
    options: QualityOptions, questions: Sequence[Question], progress: Progress, task: TaskID
) -> list[Compared]:
    """Answers of the target, and their log-likelihoods under the target itself."""
    found: list[Answered] = []
    with LLM(**vars(options.engine)) as llm:
        for start in range(0, len(questions), AT_ONCE):
            some = questions[start : start + AT_ONCE]
            found += answered(llm, some, options.max_tokens, options.outline_decoding)
            progress.advance(task, len(some))
        setup, tokenizer = llm.setup, llm.get_tokenizer()
    progress.update(task, description="reading")
    nats = log_likelihoods(setup, lambda text: tokenizer.encode(text, add_special_tokens=False), found)
    return [Compared(one, *scores) for one, scores in zip(found, nats, strict=True)]


def judged(judge: Judge, one: Compared, done: Callable[[], None]) -> Compared:
    """The answers with the judge's verdicts, where there are two of them."""
    answers = one.answered
    if answers.points is not None:
        one = replace(one, verdicts=judge.verdicts(answers.question.text, answers.plain, answers.points))
    done()
    return one


def settings_of(options: QualityOptions, judged_by: str | None) -> dict[str, Any]:
    """Everything needed to repeat the run."""
    shown = {one.name: getattr(options, one.name) for one in fields(options)}
    shown["prompts"] = [path.name for path in options.prompts]
    del shown["json"], shown["answers"], shown["judge"], shown["judge_key_file"]
    packages = {name: version(name) for name in ("penstock", "torch", "transformers")}
    return {**shown, "judge_model": judged_by, "versions": packages}


def write_answers(path: Path, compared: Sequence[Compared]) -> None:
    path.write_bytes(b"".join(msgspec.json.encode(record_of(one)) + b"\n" for one in compared))


def record_of(one: Compared) -> dict[str, Any]:
    answers = one.answered
    return {
        **asdict(answers.question),
        "plain": answers.plain,
        "points": answers.points,
        "plain_nats": one.plain_nats,
        "points_nats": one.points_nats,
        **({} if one.verdicts is None else {"verdicts": asdict(one.verdicts)}),
    }
