"""``penstock bench quality``: answers in points beside plain ones, compared by likelihood and by a judge."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any, Final

import httpx
import msgspec
import numpy as np
from rich.console import Console
from rich.progress import Progress, TaskID

from penstock.clients.api import Server, ServerError, first_model, refused
from penstock.config import OUTPUT, SAMPLING, SERVER, FieldError, Option, check
from penstock.core import RequestOutput, SamplingParams
from penstock.engine.llm import LLM
from penstock.engine.options import Dtype, EngineOptions, ModelName, Quantization, Stages, Threads
from penstock.engine.resolve import check_options
from penstock.files import naming
from penstock.lab.grid import FiguresFile, check_written, prompt_lines, turns_of
from penstock.lab.record import Text, head_of, last_states, logits_after
from penstock.lab.report import (
    Columns,
    Ratio,
    Report,
    bounds,
    consoles,
    figures_table,
    length,
    paired_ratio,
    settings_of,
)
from penstock.terminal import FiguresTable, progress_bar

if TYPE_CHECKING:
    from penstock.engine.resolve import Resolved


# -------------------------------------------------------------------------------------------------------------- options
# The options of ``penstock bench quality``, checked before anything starts.

MODES: Final = ("on", "auto")
"""Values of the option ``outline_decoding`` that give something to compare."""


@dataclass(frozen=True, kw_only=True)
class QualityOptions:
    """The model whose answers are compared, the questions, and the judge.

    Raises FieldError for a value out of range, and for a judge's option without a judge.
    """

    model: ModelName = EngineOptions.model
    dtype: Dtype = EngineOptions.dtype
    quantization: Quantization = EngineOptions.quantization
    pipeline_parallel_size: Stages = None
    threads: Threads = None
    prompts: Annotated[
        tuple[Path, ...],
        Option(
            "One JSON object a line, with 'prompt' or 'turns', of which the first is asked, and perhaps a 'category'. "
            "May be repeated.",
            SAMPLING,
            metavar="FILE.jsonl",
            default="",
        ),
    ] = ()
    num_prompts: Annotated[int, Option("Number of questions that are asked of each category of a file.", SAMPLING)] = 4
    max_tokens: Annotated[int, Option("Most tokens per answer.", SAMPLING)] = 256
    outline_decoding: Annotated[
        str,
        Option(
            "on: every question is answered in points as well; auto: those that the model calls lists.",
            SAMPLING,
            metavar="on|auto",
        ),
    ] = "on"
    judge: Annotated[
        str | None,
        Option(
            "Address of an OpenAI-compatible server that rates both answers and compares them in both orders.",
            SERVER,
            metavar="URL",
            default="none",
        ),
    ] = None
    judge_model: Annotated[
        str | None, Option("Name of one of the models that the judge has.", SERVER, default="the first it names")
    ] = None
    judge_key_file: Annotated[
        Path | None, Option("File with the key that the judge wants.", SERVER, metavar="FILE", default="")
    ] = None
    json: FiguresFile = None
    answers: Annotated[
        Path | None,
        Option("Write every question with its answers and verdicts.", OUTPUT, metavar="FILE.jsonl", default=""),
    ] = None

    def __post_init__(self) -> None:
        check(bool(self.prompts), "prompts", self.prompts, "at least one file")
        check(self.num_prompts >= 1, "num_prompts", self.num_prompts, "at least 1")
        check(self.max_tokens >= 1, "max_tokens", self.max_tokens, "at least 1")
        check(self.outline_decoding in MODES, "outline_decoding", self.outline_decoding, " or ".join(MODES))
        check_written(self, "json", "answers")
        if self.judge is None:
            for name in ("judge_model", "judge_key_file"):
                check(getattr(self, name) is None, name, getattr(self, name), "left out where there is no judge")
        _ = self.server  # raises FieldError where judge is no address

    @property
    def server(self) -> Server | None:
        """The judge's server; None without a judge. Raises FieldError if ``judge`` is no address."""
        if self.judge is None:
            return None
        try:
            return Server(url=self.judge, api_key_file=self.judge_key_file)
        except FieldError as error:
            raise FieldError("judge", str(error).removeprefix("url ")) from error

    @property
    def engine(self) -> EngineOptions:
        """The options of the engine that answers. It does not speculate: only the texts are compared."""
        return EngineOptions(
            model=self.model,
            dtype=self.dtype,
            quantization=self.quantization,
            pipeline_parallel_size=self.pipeline_parallel_size,
            threads=self.threads,
            speculative_config=None,
        )


# -------------------------------------------------------------------------------------------------------------- answers
# One model answers the questions twice: plainly, and in points.


@dataclass(frozen=True)
class RatedQuestion:
    """A question. ``category``: the name of its file without suffix, then the entry's own category if it has one."""

    category: str
    text: str


@dataclass(frozen=True)
class Answered:
    """A question, its prompt's token ids, and its answers; ``points`` is None if the model wrote no outline."""

    question: RatedQuestion
    prompt: Sequence[int]
    plain: str
    points: str | None


def questions_of(files: Sequence[Path], per_category: int) -> list[RatedQuestion]:
    """The first ``per_category`` questions of each category. Raises ConfigError naming file, line and field."""
    return [question for file in files for question in questions_in(file, per_category)]


def questions_in(file: Path, per_category: int) -> Iterator[RatedQuestion]:
    """The first ``per_category`` questions of each category in a file. Raises ConfigError naming line and field."""
    seen: Counter[str] = Counter()
    for where, line in prompt_lines(file):
        turns = turns_of(line, where)
        own = json.loads(line).get("category")
        category = f"{file.stem}: {own}" if isinstance(own, str) and own else file.stem
        seen[category] += 1
        if seen[category] <= per_category:
            yield RatedQuestion(category, turns[0])


def answered(llm: LLM, questions: Sequence[RatedQuestion], max_tokens: int, outline_decoding: str) -> list[Answered]:
    """Both answers to every question, plain and in points, decoded greedily."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    conversations = [[{"role": "user", "content": question.text}] for question in questions]
    plain = llm.chat(conversations, params)
    outlined = llm.chat(conversations, params, outline_decoding=outline_decoding)
    return [
        Answered(question, one.prompt_token_ids, one.outputs[0].text, points_of(other))
        for question, one, other in zip(questions, plain, outlined, strict=True)
    ]


def points_of(output: RequestOutput) -> str | None:
    """The answer in points; None if the model wrote no outline, or an answer of another form."""
    return output.outputs[0].text if output.outline is not None and output.outline.used else None


# ---------------------------------------------------------------------------------------------------------------- judge
# A model as the judge of answers: it rates each alone, and compares two of them in both orders.
#
# Source: Zheng et al., "Judging LLM-as-a-Judge with MT-Bench and Chatbot Arena" (2023), section 3: single answer
# grading and pairwise comparison, in both orders because judges favour a position.

VERDICT_TOKENS: Final = 512
"""Most tokens of a judge's reply: a short explanation and the verdict."""
LOWEST, HIGHEST = 1.0, 10.0
"""The range of grades. It is that of MT-Bench's judge (Zheng et al. 2023)."""
RATING: Final = re.compile(r"\[\[\s*(\d+(?:\.\d+)?)\s*\]\]")
"""Pattern of a grade in a judge's reply (group 1)."""
CHOICE: Final = re.compile(r"\[\[\s*([ABC])\s*\]\]")
"""Pattern of a choice in a judge's reply (group 1): A, B, or C for neither."""
RATE: Final = f"""You grade answers. Below are a user's question and an assistant's answer to it.
Consider whether the answer is helpful, relevant, correct, thorough and clear. A longer answer is not better by itself.
First give your reasons in a few sentences. Then write your grade, a number from {LOWEST:.0f} (useless) to \
{HIGHEST:.0f} (excellent), in double square brackets, like this: [[5]]."""
COMPARE: Final = """You compare answers. Below are a user's question and the answers of two assistants, A and B.
Consider which one is more helpful, relevant, correct, thorough and clear. Neither the order of the answers nor their
length may count.
First give your reasons in a few sentences. Then write your verdict in double square brackets: [[A]] if A is better, \
[[B]] if B is better, [[C]] if neither is."""
"""The instructions for rating one answer, and for comparing two."""


class Preferred(StrEnum):
    """The better one of two answers; neither if a judge's choices in the two orders disagree."""

    PLAIN = "plain"
    POINTS = "points"
    NEITHER = "neither"


@dataclass(frozen=True)
class Verdicts:
    """The judge's ratings, 1 to 10, and choice for one question; None for a reply that holds no verdict."""

    plain: float | None
    points: float | None
    preferred: Preferred | None


class Judge:
    """A model behind a server that rates and compares answers."""

    def __init__(self, server: Server, model: str | None) -> None:
        self._server = server
        self._http = httpx.Client(**server.client_options)
        self._model = model

    @property
    def model(self) -> str:
        """The model's name. Raises ServerError if no server answers, or if it names no model."""
        if self._model is None:
            self._model = first_model(self._sent("GET", "/models"))
        return self._model

    def verdicts(self, question: str, plain: str, points: str) -> Verdicts:
        """The verdicts on both answers to a question, from four requests. Raises ServerError if one fails."""
        return Verdicts(
            self.rating(question, plain), self.rating(question, points), self.choice(question, plain, points)
        )

    def rating(self, question: str, answer: str) -> float | None:
        """The grade of an answer, 1 to 10; None if the reply holds none. Raises ServerError if the request fails."""
        return rating_in(self._reply(RATE, {"Question": question, "Answer": answer}))

    def choice(self, question: str, plain: str, points: str) -> Preferred | None:
        """The better answer, by two requests with the answers in either order; None without two choices."""
        first = choice_in(self._reply(COMPARE, {"Question": question, "Answer of A": plain, "Answer of B": points}))
        second = choice_in(self._reply(COMPARE, {"Question": question, "Answer of A": points, "Answer of B": plain}))
        return agreed(first, second)

    def _reply(self, task: str, parts: dict[str, str]) -> str:
        """The judge's reply to a task about these parts. Raises ServerError if there is none that can be read."""
        asked = "\n\n".join(f"### {title}\n{text}" for title, text in parts.items())
        body = {
            "model": self.model,
            "messages": [{"role": "system", "content": task}, {"role": "user", "content": asked}],
            "temperature": 0,
            "max_tokens": VERDICT_TOKENS,
        }
        try:
            content: Any = self._sent("POST", "/chat/completions", body).json()["choices"][0]["message"]["content"]
        except (ValueError, LookupError, TypeError) as error:
            raise ServerError("no answer", f"the judge's reply cannot be read: {error}") from error
        return content if isinstance(content, str) else ""

    def _sent(self, method: str, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
        """The response to a request. Raises ServerError if nobody answers, or the server refuses."""
        try:
            response = self._http.request(method, path, json=body)
        except httpx.HTTPError as error:
            kind = type(error).__name__
            raise ServerError(kind, f"judge: nobody answers at {self._server.shown} ({error or kind})") from error
        if not response.is_success:
            raise refused(response)
        return response

    def close(self) -> None:
        """Close the connection."""
        self._http.close()


def rating_in(reply: str) -> float | None:
    """The last grade in a reply; None if it has none, or one out of range."""
    found = RATING.findall(reply)
    rating = float(found[-1]) if found else None
    return rating if rating is not None and LOWEST <= rating <= HIGHEST else None


def choice_in(reply: str) -> str | None:
    """The last choice in a reply; None if it has none."""
    found = CHOICE.findall(reply)
    return found[-1] if found else None


def agreed(first: str | None, second: str | None) -> Preferred | None:
    """The choice that follows from two verdicts: the plain answer was A in the first one, and B in the second."""
    if first is None or second is None:
        return None
    if (first, second) == ("A", "B"):
        return Preferred.PLAIN
    return Preferred.POINTS if (first, second) == ("B", "A") else Preferred.NEITHER


# ----------------------------------------------------------------------------------------------------------- likelihood
# Quality without a judge: the target's own likelihood of each answer, as an answer to the plain prompt.


def log_likelihoods(
    setup: Resolved, encode: Callable[[str], Sequence[int]], answers: Sequence[Answered]
) -> list[tuple[float | None, float | None]]:
    """Mean log-likelihood per token, in nats, of each plain answer and of each answer in points; None for an empty one.

    Both are read as texts after the plain prompt, in this process and after the engine has ended: it had the memory.
    """
    pairs = [(answer.plain, answer.points) for answer in answers]
    texts = [
        [Text(answer.prompt, encode(text)) if text else None for text in pair]
        for answer, pair in zip(answers, pairs, strict=True)
    ]
    found = iter(means(setup, [text for pair in texts for text in pair if text is not None and text.picked]))
    scored = [[next(found) if text is not None and text.picked else None for text in pair] for pair in texts]
    return [(plain, points) for plain, points in scored]


def means(setup: Resolved, texts: Sequence[Text]) -> list[float]:
    """The mean log-likelihood of each text's tokens after its prompt, in nats per token."""
    if not texts:
        return []
    states = last_states(setup, setup.checkpoint, setup.layers, texts)
    head = head_of(setup, setup.checkpoint)
    return [
        float(
            np.mean(
                [
                    logits_V[token] - np.logaddexp.reduce(logits_V)
                    for logits_V, token in zip(logits_after(head, left, text), text.picked, strict=True)
                ]
            )
        )
        for text, left in zip(texts, states, strict=True)
    ]


# -------------------------------------------------------------------------------------------------------------- summary
# Quality by category of questions, over the questions that were answered in points.

ALL = "all"
"""The name of the category of all questions."""


@dataclass(frozen=True)
class Compared:
    """A question's answers, their log-likelihoods per token in nats, and the judge's verdicts if there is a judge."""

    answered: Answered
    plain_nats: float | None
    points_nats: float | None
    verdicts: Verdicts | None = None


@dataclass(frozen=True)
class CategoryQuality:
    """Figures of a category. Means are over the questions that have both values, and None if none has.

    ``perplexity``: that of an answer in points over that of the plain one, by question. ``preferred``: the judge's
    choices; ``unread``: its replies without a choice.
    """

    category: str
    questions: int
    in_points: int
    plain_nats: float | None
    points_nats: float | None
    perplexity: Ratio | None
    plain_rating: float | None
    points_rating: float | None
    preferred: dict[str, int]
    unread: int


def summarized(compared: Sequence[Compared]) -> list[CategoryQuality]:
    """The figures of each category, in the order of the questions, and of all questions together at the end."""
    categories = list(dict.fromkeys(one.answered.question.category for one in compared))
    of = {name: [one for one in compared if one.answered.question.category == name] for name in categories}
    return [category(name, some) for name, some in of.items()] + [category(ALL, compared)]


def category(name: str, compared: Sequence[Compared]) -> CategoryQuality:
    """The figures of the questions ``compared``, under a category's name."""
    some = [one for one in compared if one.answered.points is not None]
    nats = both((one.plain_nats, one.points_nats) for one in some)
    verdicts = [one.verdicts for one in some if one.verdicts is not None]
    ratings = both((one.plain, one.points) for one in verdicts)
    chosen = Counter(one.preferred for one in verdicts)
    return CategoryQuality(
        category=name,
        questions=len(compared),
        in_points=len(some),
        plain_nats=mean([plain for plain, _ in nats]),
        points_nats=mean([points for _, points in nats]),
        perplexity=perplexities(nats),
        plain_rating=mean([plain for plain, _ in ratings]),
        points_rating=mean([points for _, points in ratings]),
        preferred={str(one): chosen[one] for one in Preferred},
        unread=chosen[None],
    )


def both(pairs: Iterable[tuple[float | None, float | None]]) -> list[tuple[float, float]]:
    """The pairs of which both values are known."""
    return [(one, other) for one, other in pairs if one is not None and other is not None]


def mean(values: Sequence[float]) -> float | None:
    """The mean; None without values."""
    return fmean(values) if values else None


def perplexities(nats: Sequence[tuple[float, float]]) -> Ratio | None:
    """The ratio of perplexities, points over plain; None without values."""
    return paired_ratio([math.exp(plain - points) for plain, points in nats])


QUESTIONS: Final[Columns[CategoryQuality]] = {
    "questions": lambda one: str(one.questions),
    "in points": lambda one: str(one.in_points),
}
JUDGED: Final[Columns[CategoryQuality]] = {
    "plain,\n1-10": lambda one: length(one.plain_rating),
    "points,\n1-10": lambda one: length(one.points_rating),
    "prefers plain,\npoints, neither": lambda one: ", ".join(map(str, one.preferred.values())),
    "unread": lambda one: str(one.unread),
}
LIKELIHOOD: Final[Columns[CategoryQuality]] = {
    "plain,\nnats/token": lambda one: length(one.plain_nats),
    "points,\nnats/token": lambda one: length(one.points_nats),
    "perplexity,\npoints/plain": lambda one: length(None if one.perplexity is None else one.perplexity.mean),
    "95%": lambda one: bounds(None if one.perplexity is None else one.perplexity.bounds),
}
"""Columns of the table, by heading: counts, the judge's figures, and likelihood."""


def table_of(found: Sequence[CategoryQuality], judged: bool) -> FiguresTable:
    """The table of all categories."""
    columns = {**QUESTIONS, **(JUDGED if judged else {}), **LIKELIHOOD}
    return figures_table("category", None, columns, [(one.category, one) for one in found])


def report_of(settings: Mapping[str, Any], found: Sequence[CategoryQuality], judged: bool) -> Report:
    """The report: the table, and as its document settings and figures."""
    document = {"settings": settings, "categories": [asdict(one) for one in found]}
    return Report(document, [table_of(found, judged)])


# -------------------------------------------------------------------------------------------------------------- command
# ``penstock bench quality``: the command itself.

AT_ONCE: Final = 4
"""Questions that are answered together. More fill batches better, and show progress more seldom."""


def run_bench_quality(options: QualityOptions, console: Console | None = None) -> list[CategoryQuality]:
    """Answer, compare, print the table and write the files.

    Raises ConfigError before anything starts, and ServerError if the judge cannot be reached or fails.
    """
    questions = checked(options)
    console, out = consoles(console)
    judge = Judge(options.server, options.judge_model) if options.server is not None else None
    with closing(judge) if judge is not None else nullcontext(), progress_bar(console) as progress:
        judged_by = judge.model if judge is not None else None  # first, so that a missing judge is noticed soon
        task = progress.add_task("answering", total=len(questions))
        compared = compared_by_itself(options, questions, progress, task)
        if judge is not None:
            progress.update(task, description="judging", completed=0)
            compared = [judged(judge, one, lambda: progress.advance(task)) for one in compared]
    found = summarized(compared)
    settings = settings_of(
        options,
        without=("json", "answers", "judge", "judge_key_file"),
        packages=["torch", "transformers"],
        prompts=[path.name for path in options.prompts],
        judge_model=judged_by,
    )
    report_of(settings, found, judged=judge is not None).deliver(out, options.json)
    if options.answers is not None:
        write_answers(options.answers, compared)
    return found


def checked(options: QualityOptions) -> list[RatedQuestion]:
    """The questions, if the bench can begin; the model is fetched if it is not here.

    Raises ConfigError for files, options or a model that cannot be used.
    """
    questions = questions_of(options.prompts, options.num_prompts)
    check_options(options.engine)
    return questions


def compared_by_itself(
    options: QualityOptions, questions: Sequence[RatedQuestion], progress: Progress, task: TaskID
) -> list[Compared]:
    """Both answers of the target, and their log-likelihoods under the target itself."""
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
    """The answers with the judge's verdicts, if there are two of them."""
    answers = one.answered
    if answers.points is not None:
        one = replace(one, verdicts=judge.verdicts(answers.question.text, answers.plain, answers.points))
    done()
    return one


def write_answers(path: Path, compared: Sequence[Compared]) -> None:
    """Write a line for each question, with its answers and verdicts."""
    with naming(path):
        path.write_bytes(b"".join(msgspec.json.encode(record_of(one)) + b"\n" for one in compared))


def record_of(one: Compared) -> dict[str, Any]:
    """A question, its answers and verdicts as a table."""
    answers = one.answered
    return {
        **asdict(answers.question),
        "plain": answers.plain,
        "points": answers.points,
        "plain_nats": one.plain_nats,
        "points_nats": one.points_nats,
        **({} if one.verdicts is None else {"verdicts": asdict(one.verdicts)}),
    }
