"""Answers of plain decoding for the synthetic drafter, which has to know an answer before it drafts for the request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final, Protocol

from penstock.core import RequestError, RequestOutput, SamplingParams
from penstock.drafters.base import Drafter
from penstock.drafters.synthetic import SyntheticDrafter
from penstock.emulation.cluster import off_its_device
from penstock.engine.job import Job, Prompt
from penstock.requests.request import Request
from penstock.speculation import SpeculativeConfig

PLAIN: Final = SpeculativeConfig(strategy="autoregressive")
"""Settings of a request that is decoded without drafts, whatever drafter the engine has."""


class PlainAnswers:
    """The output token ids of plain decoding, by request. The synthetic drafter calls this object to look them up."""

    def __init__(self) -> None:
        self.known: dict[Any, Sequence[int]] = {}

    def __call__(self, request: Request) -> Sequence[int]:
        return self.known[key_of(request)]

    def cover(self, job: Job) -> bool:
        return all(key_of(request) in self.known for request in job.requests)

    def remember(self, job: Job) -> None:
        """Keep a job's outputs as answers, except those that a stop string cut short: they are incomplete."""
        for request, completion in zip(job.requests, job.completions, strict=True):
            if not isinstance(completion.output.stop_reason, str):
                self.known[key_of(request)] = completion.output.token_ids


class Engine(Protocol):
    """The part of ``LLM`` that decodes the answers."""

    @property
    def drafter(self) -> Drafter | None: ...

    def job(self, prompt: Prompt, params: SamplingParams, *, speculation: SpeculativeConfig | None = None) -> Job: ...

    def complete(self, jobs: Sequence[Job]) -> list[RequestOutput]: ...


def answers_of(engine: Engine) -> PlainAnswers | None:
    """The answers that the engine's drafter looks up; None where it is not the synthetic one."""
    drafter = off_its_device(engine.drafter)
    known = drafter.answer if isinstance(drafter, SyntheticDrafter) else None
    return known if isinstance(known, PlainAnswers) else None


def learn_answers(engine: Engine, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> None:
    """Decode plainly the prompts that the synthetic drafter will draft for and has no answer to yet.

    Raises RequestError for a sampled request without a seed: its tokens would differ when it is decoded again.
    """
    answers = answers_of(engine)
    if answers is None:
        return
    if any(one.seed is None and one.temperature > 0 for one in params):
        raise RequestError("seed is None: with the synthetic drafter sampled requests need a fixed seed")
    # Without stop strings: the answer is the same up to them, and serves requests with other ones, too.
    jobs = [
        engine.job(prompt, replace(one, stop=()), speculation=PLAIN)
        for prompt, one in zip(prompts, params, strict=True)
    ]
    unknown = [job for job in jobs if not answers.cover(job)]
    if unknown:
        engine.complete(unknown)
    for job in unknown:
        answers.remember(job)


def key_of(request: Request) -> Any:
    return tuple(request.prompt), request.sampling, request.max_tokens, request.stop_ids
