"""Decodes with a strategy of the bench's choice, over the engine's drafter and stages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from penstock.core import RequestOutput, SamplingParams
from penstock.engine.answers import PLAIN, answers_of, learn_answers
from penstock.speculation import SpeculativeConfig

if TYPE_CHECKING:
    from penstock.engine.job import Prompt
    from penstock.engine.llm import LLM


def decode(
    llm: LLM, prompts: Sequence[Prompt], params: Sequence[SamplingParams], config: SpeculativeConfig | None
) -> list[RequestOutput]:
    """``LLM.generate`` with the strategy of ``config``, whose drafter is the engine's; None decodes plainly.

    A plain run also teaches the synthetic drafter its answers.
    """
    if config is not None and config.strategy != PLAIN.strategy:
        learn_answers(llm, prompts, params)
    jobs = [llm.job(prompt, one, speculation=config or PLAIN) for prompt, one in zip(prompts, params, strict=True)]
    outputs = llm.complete(jobs)
    if config is None and (answers := answers_of(llm)) is not None:
        for job in jobs:
            answers.remember(job)
    return outputs
