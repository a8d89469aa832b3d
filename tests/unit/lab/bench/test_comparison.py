"""Strategies take turns, each with what it has learned itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from penstock.core import CompletionOutput, RequestOutput, SamplingParams
from penstock.engine.scheduler import Advance
from penstock.estimates.estimates import Estimates
from penstock.lab.bench.comparison import measure
from penstock.lab.grid import WARM_UP
from penstock.speculation import SpeculativeConfig
from penstock.tree import Node


class FakeLLM:
    """Notes who runs how many tokens with which estimates."""

    def __init__(self) -> None:
        self.setup = SimpleNamespace(stages=2, cluster=None, speculator=None)
        self.loop = SimpleNamespace(use_estimates=self.use_estimates, drain=lambda: None, observers=[])
        self.drafter = None
        self.estimates = self.loop.estimates = Estimates()
        self.runs: list[tuple[str, int, Estimates]] = []

    def use_estimates(self, estimates: Estimates) -> None:
        self.estimates = estimates

    @contextmanager
    def observing(self, observer: object) -> Iterator[None]:
        self.loop.observers.append(observer)
        yield
        self.loop.observers.remove(observer)

    def job(self, prompt: str, params: SamplingParams, *, speculation: SpeculativeConfig) -> str:
        self.runs.append((speculation.strategy, params.max_tokens, self.estimates))
        return prompt

    def complete(self, jobs: Sequence[str]) -> list[RequestOutput]:
        for observer in self.loop.observers:
            observer.advanced(None, Advance(committed=[Node(1, 1, 1, 0)]), 1.0)
        completion = CompletionOutput(0, [1, 2, 3], seconds=2.0, first_token_seconds=1.0)
        return [RequestOutput("0", jobs[0], [1], [completion], finished=True)]


def test_each_strategy_warms_up_and_learns_from_its_own_runs_alone() -> None:
    """Plain decoding comes first wherever it is named; from the second question on each begins in its turn."""
    llm: Any = FakeLLM()
    entries = [
        ("auto", SpeculativeConfig()),
        ("autoregressive", None),
        ("pipedec", SpeculativeConfig(strategy="pipedec")),
    ]
    params = [SamplingParams(seed=seed, max_tokens=8) for seed in (0, 1)]
    runs = measure(llm, ["a", "b"], params, entries)
    order = ["autoregressive", "auto", "pipedec"]
    assert [(name, tokens) for name, tokens, _ in llm.runs[:3]] == [(name, WARM_UP) for name in order]
    assert [(name, tokens) for name, tokens, _ in llm.runs[3:]] == [
        (name, 8) for name in [*order, *order[1:], order[0]]
    ]
    learning = {name: {id(estimates) for who, _, estimates in llm.runs if who == name} for name in order}
    assert [len(own) for own in learning.values()] == [1, 1, 1]
    assert len(set.union(*learning.values())) == 3
    assert [(run.strategy, len(run.requests)) for run in runs] == [("autoregressive", 2), ("auto", 2), ("pipedec", 2)]
