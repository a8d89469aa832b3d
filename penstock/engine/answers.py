"""What plain decoding gives, which the synthetic drafter has to know: decoded before a request that it drafts for."""

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
"""Decodes plainly beside whatever drafter there is."""


class PlainAnswers:
    """The output token ids of plain decoding, by what was asked. Called by the synthetic drafter."""

    def __init__(self) -> None:
        self.known: dict[Any, Sequence[int]] = {}

    def __call__(self, request: Request) -> Sequence[int]:
        return self.known[key_of(request)]

    def cover(self, job: Job) -> bool:
        return all(key_of(request) in self.known for request in job.requests)

    def remember(self, job: Job) -> None:
        """Keep what plain decoding has given. An answer that a stop string cut short is none."""
        for request, completion in zip(job.requests, job.completions, strict=True):
            if not isinstance(completion.output.stop_reason, str):
                self.known[key_of(request)] = completion.output.token_ids


class Engine(Protocol):
    """What is needed of an ``LLM``."""

    @property
    def drafter(self) -> Drafter | None: ...

    def job(self, prompt: Prompt, params: SamplingParams, *, speculation: SpeculativeConfig | None = None) -> Job: ...

    def complete(self, jobs: Sequence[Job]) -> list[RequestOutput]: ...


def answers_of(engine: Engine) -> PlainAnswers | None:
    """What the engine's drafter knows of plain decoding; None where it is not the synthetic one."""
    drafter = off_its_device(engine.drafter)
    known = drafter.answer if isinstance(drafter, SyntheticDrafter) else None
    return known if isinstance(known, PlainAnswers) else None


def learn_answers(engine: Engine, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> None:
    """Decode plainly what the synthetic drafter will be asked about and does not know yet.

    Raises RequestError for a sampled request without a seed: its tokens would be others when it is decoded again.
    """
    answers = answers_of(engine)
    if answers is None:
        return
    if any(one.seed is None and one.temperature > 0 for one in params):
        raise RequestError("seed is None: with the synthetic drafter sampled requests need a fixed seed")
    # Without stop strings: the answer is the same up to them, and known to requests with others.
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
