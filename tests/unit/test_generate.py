"""The lines that ``penstock generate`` prints about a completion."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from penstock.core import CompletionOutput, FinishReason, OutlineOutput
from penstock.engine.options import EngineOptions
from penstock.run import end_line, metrics_of, outline_line, statistics_line
from penstock.speculation import SpeculativeConfig


def said(strategy: str | None, speed_up: float | None) -> str:
    """Return the line for 11 tokens: the first after 0.5 s, then ten in one second."""
    speculation = SpeculativeConfig(method="ngram", strategy=strategy) if strategy is not None else None
    setup: Any = SimpleNamespace(
        speculation=speculation, stages=2, cluster=None, emulated=False, options=EngineOptions()
    )
    completion = CompletionOutput(0, list(range(11)), seconds=1.5, first_token_seconds=0.5, speed_up=speed_up)
    return statistics_line(metrics_of(setup, completion, 2.04, "exact"))


@pytest.mark.parametrize("strategy", ["auto", "continuous"])
def test_the_speed_stands_beside_plain_decodings_where_that_was_measured(strategy: str) -> None:
    assert said(strategy, 0.81).startswith("11 tokens, 10.0 tokens/s, 0.8 times plain · ")
    assert said(strategy, None).startswith("11 tokens, 10.0 tokens/s · ")


def test_the_wait_for_the_first_token_and_the_strategy_stand_at_the_end() -> None:
    assert said("auto", None).endswith(" · first token after 0.50 s · auto")


@pytest.mark.parametrize(
    ("reason", "tokens", "words"),
    [
        (FinishReason.STOP, 11, None),
        (FinishReason.ABORT, 11, None),
        (FinishReason.LENGTH, 11, "cut at 11 tokens; --max-tokens allows more"),
        (FinishReason.LENGTH, 24, "the context is full: 64 tokens; --max-model-len makes it longer "),
    ],
)
def test_an_end_that_is_not_the_models_is_told_with_the_way_on(
    reason: FinishReason, tokens: int, words: str | None
) -> None:
    line = end_line(CompletionOutput(0, list(range(tokens)), finish_reason=reason), prompt_tokens=40, longest=64)
    assert line == words if words is None or line is None else line.startswith(words)


def test_an_answer_in_points_is_said_to_be_another_one() -> None:
    used = OutlineOutput(used=True, reason="the target gives the answer the form 'list'", titles=["A", "B"])
    assert outline_line(used).startswith("2 points side by side, which is not the plain answer: the target")
    assert outline_line(OutlineOutput(reason="it is short")) == "the plain answer: it is short"
