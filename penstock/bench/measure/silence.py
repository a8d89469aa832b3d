"""Requests that leave nothing to time, and the message that replaces a row of zeros."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from penstock.bench.entries import PLAIN
from penstock.bench.grid import Question, Setting
from penstock.bench.measure.summary import StrategyRun
from penstock.core import PenstockError
from penstock.engine.empty import ended_at_once, why_empty
from penstock.engine.job import Prompt

if TYPE_CHECKING:
    from penstock.engine.llm import LLM


class NothingToTime(PenstockError):
    """Every request of a setting ended before a token could be timed."""


def silent_settings(llm: LLM, runs: Sequence[StrategyRun], questions: Sequence[Question]) -> dict[Setting, str]:
    """The settings in which no request has a second token, the first that is timed, with the reason for each."""
    prompts = {question.setting: question.prompt for question in questions}
    found = {}
    for run in runs:
        if run.strategy == PLAIN and not run.tokens:
            found[run.setting] = f"{run.setting}: nothing to time; {reason(llm, run, prompts[run.setting])}"
    return found


def reason(llm: LLM, run: StrategyRun, prompt: Prompt) -> str:
    completion = run.outputs[0].outputs[0]
    if not ended_at_once(completion):
        return f"no request has more than {len(completion.token_ids)} token (it ended with {completion.stop_reason!r})"
    token = completion.token_ids[0]
    requests = "the request" if len(run.outputs) == 1 else f"all {len(run.outputs)} requests"
    return f"{requests}: {why_empty(token, llm.get_tokenizer(), plain_text=isinstance(prompt, str))}"


def first_token_remark(setting: Setting, runs: Sequence[StrategyRun]) -> str | None:
    """A remark on the number of requests missing from the speed-ups; None where there are none."""
    silent = sum(not request["tokens"] for request in runs[0].requests)
    if not silent:
        return None
    of = len(runs[0].requests)
    return f"{setting}: {silent} of {of} requests ended with their first token, left out of the speed-ups."
