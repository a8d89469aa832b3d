"""The plain decodings that the synthetic drafter knows, and when they are computed."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.core import CompletionOutput, RequestError, RequestOutput, SamplingParams
from penstock.drafters.base import SyntheticDrafter
from penstock.drafters.merged import NgramDrafter
from penstock.engine.build import PLAIN, PlainAnswers, answers_of, learn_answers
from penstock.engine.completion import Job
from penstock.speculation import SpeculativeConfig

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


class FakeLLM:
    """Answers every prompt with its token ids backwards, and notes what it decodes."""

    def __init__(self, drafter: Any = None) -> None:
        self.drafter = SyntheticDrafter([0.5], 100, 0, PlainAnswers()) if drafter is None else drafter
        self.decoded: list[list[int]] = []

    def job(self, prompt: Any, params: SamplingParams, *, speculation: SpeculativeConfig | None = None) -> Job:
        assert speculation is PLAIN
        assert not params.stop
        job, ids = Job(None, prompt["prompt_token_ids"], params), prompt["prompt_token_ids"]
        job.requests.append(a_request(ids, params))
        job.completions.append(SimpleNamespace(output=CompletionOutput(0, ids[::-1])))  # type: ignore[arg-type]
        return job

    def complete(self, jobs: Sequence[Job]) -> list[RequestOutput]:
        self.decoded += [job.ids for job in jobs]
        return []


def a_request(ids: list[int], params: SamplingParams) -> Any:
    return SimpleNamespace(prompt=ids, sampling=params.seed, max_tokens=params.max_tokens, stop_ids=frozenset())


def prompt(*ids: int) -> dict[str, list[int]]:
    return {"prompt_token_ids": list(ids)}


def test_what_is_not_known_is_decoded_plainly_once_and_without_stop_strings() -> None:
    llm = FakeLLM()
    stopping = SamplingParams(temperature=0.0, max_tokens=8, stop=("x",))
    learn_answers(llm, [prompt(1, 2)], [GREEDY])
    learn_answers(llm, [prompt(1, 2), prompt(3, 4)], [stopping, GREEDY])
    assert llm.decoded == [[1, 2], [3, 4]]
    assert llm.drafter.answer(a_request([3, 4], GREEDY)) == [4, 3]


def test_another_seed_is_another_answer() -> None:
    llm = FakeLLM()
    for seed in (0, 1, 0):
        learn_answers(llm, [prompt(1, 2)], [SamplingParams(seed=seed, max_tokens=8)])
    assert len(llm.decoded) == 2


def test_a_sampled_request_needs_a_seed() -> None:
    with pytest.raises(RequestError, match="need a fixed seed"):
        learn_answers(FakeLLM(), [prompt(1)], [SamplingParams()])


def test_other_drafters_need_to_know_nothing() -> None:
    llm = FakeLLM(NgramDrafter(3, 1))
    learn_answers(llm, [prompt(1)], [SamplingParams()])
    assert answers_of(llm) is None
    assert not llm.decoded


def test_an_answer_that_a_stop_string_cut_short_is_not_kept() -> None:
    llm, answers = FakeLLM(), PlainAnswers()
    for reason, kept in (("x", False), (7, True)):
        job = llm.job(prompt(1, 2), GREEDY, speculation=PLAIN)
        job.completions[0].output.stop_reason = reason
        answers.remember(job)
        assert answers.cover(job) is kept
