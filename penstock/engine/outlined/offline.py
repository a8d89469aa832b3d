"""Answers in points for ``LLM``: many questions at a time, step by step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from penstock.core import CompletionOutput, RequestOutput
from penstock.engine.answers import Engine as Decoder
from penstock.engine.answers import learn_answers
from penstock.engine.completion import CompletionDelta
from penstock.engine.job import Job
from penstock.engine.loop import Observer
from penstock.engine.outlined.joined import Joined, timed
from penstock.outlines.asks import Ask, Step, Steps


class Engine(Decoder, Protocol):
    """The part of ``LLM`` that answers in points need."""

    def observing(self, observer: Observer) -> Any: ...


class Run:
    """One question on its way: the step that is due, and the answer once its last step is done."""

    def __init__(self, steps: Steps, prompt: dict[str, Any]) -> None:
        self._steps = steps
        self._prompt = prompt
        self.step: Step = next(steps)
        self.jobs: list[Job] = []

    def advance(self, outputs: list[RequestOutput]) -> RequestOutput | None:
        """Take the outputs of the step. Returns the answer if it was the last step, else None."""
        if not self.step.last:
            self.step = self._steps.send(outputs)
            return None
        joined = Joined(self.step.headings)
        for number, output in enumerate(outputs):
            joined.push(number, all_of(output.outputs[0]))
        whole, delta, report = CompletionOutput(0), joined.take(), self.step.report
        assert delta is not None
        delta.add_to(whole)
        timed(whole, report, outputs)
        report.points = outputs if report.used else []
        name, cached = outputs[0].request_id, outputs[0].num_cached_tokens
        text, ids = self._prompt["prompt"], self._prompt["prompt_token_ids"]
        return RequestOutput(name, text, ids, [whole], True, cached, report)


def all_of(one: CompletionOutput) -> CompletionDelta:
    """A whole completion as one delta."""
    return CompletionDelta(0, one.token_ids, one.text, one.logprobs, one.finish_reason, one.stop_reason)


class Teller(Observer):
    """Passes the text of an answer to ``tell`` as it comes, in order."""

    def __init__(self, run: Run, tell: Callable[[str], None]) -> None:
        self._joined = Joined(run.step.headings)
        self._jobs = run.jobs
        self._tell = tell

    def waits(self) -> None:
        for number, job in enumerate(self._jobs):
            if (delta := job.completions[0].take()) is not None:
                self._joined.push(number, delta)
        if (new := self._joined.take()) is not None and new.text:
            self._tell(new.text)


def answer_in_points(
    engine: Engine, runs: Sequence[Run], tell: Callable[[str], None] | None = None
) -> list[RequestOutput]:
    """The answers to all questions, in order. With a single question ``tell`` gets its text as it comes.

    Raises as ``LLM.generate`` does.
    """
    answers: dict[int, RequestOutput] = {}
    while pending := [number for number in range(len(runs)) if number not in answers]:
        for number in pending:
            run = runs[number]
            prepare(engine, run.step.asks)
            run.jobs = [job_of(engine, ask) for ask in run.step.asks]
        outputs = iter(complete(engine, [runs[number] for number in pending], tell))
        for number in pending:
            answer = runs[number].advance([next(outputs) for _ in runs[number].jobs])
            if answer is not None:
                answers[number] = answer
    return [answers[number] for number in range(len(runs))]


def complete_step(engine: Engine, step: Step) -> list[RequestOutput]:
    """The outputs of one step's requests, which run by themselves."""
    prepare(engine, step.asks)
    return engine.complete([job_of(engine, ask) for ask in step.asks])


def prepare(engine: Engine, asks: Sequence[Ask]) -> None:
    learn_answers(engine, [ask.prompt for ask in asks], [ask.params for ask in asks])


def job_of(engine: Engine, ask: Ask) -> Job:
    job = engine.job(ask.prompt, ask.params)
    job.pinned = ask.pinned
    return job


def complete(engine: Engine, runs: Sequence[Run], tell: Callable[[str], None] | None) -> list[RequestOutput]:
    jobs = [job for run in runs for job in run.jobs]
    if tell is None or not runs[0].step.last:
        return engine.complete(jobs)
    teller = Teller(runs[0], tell)
    with engine.observing(teller):
        try:
            return engine.complete(jobs)
        finally:
            teller.waits()
