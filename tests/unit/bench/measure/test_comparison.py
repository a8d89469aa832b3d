"""From the samples of a setting to its figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.bench.grid import Question, Setting
from penstock.bench.measure.comparison import WARM_UP, acceptance, measure, speedups
from penstock.bench.measure.hits import HitCounts
from penstock.bench.measure.sample import Sample
from penstock.config import SpeculativeConfig
from penstock.core import CompletionOutput, RequestOutput, SamplingParams, SpeculationMetrics
from penstock.engine.commit import Advance
from penstock.estimates.estimates import Estimates
from penstock.tree import Node


def a_sample(seconds: float, timesteps: int, token_ids: list[int] | None = None) -> Sample:
    ids = token_ids or list(range(11))
    hits = HitCounts()
    hits.entered, hits.accepted = 20, 5
    hits.decided.update({1: 8, 3: 2})
    hits.hit.update({1: 6})
    completion = CompletionOutput(0, ids, metrics=SpeculationMetrics(drafts=2, accepted=6, misses=2))
    question = Question(Setting("chat", 0.0), 0, "a", SamplingParams(seed=0))
    return Sample(
        question=question,
        output=RequestOutput("0", "a", [1], [completion], finished=True),
        tokens=len(ids) - 1,
        seconds=seconds,
        latency_seconds=seconds + 1,
        first_token_seconds=1.0,
        timesteps=timesteps,
        hits=hits,
        stage_busy=[0.5, 0.5],
        stage_seconds=0.1,
        rows_computed=1,
        rows_cancelled=0,
        feature_bytes=0.0,
        overruns=(0, 1),
        overhead_per_hop=0.0,
        overhead_per_loop=0.0,
    )


def test_speedups_are_geometric_means_over_pairs() -> None:
    plain = [a_sample(8.0, 40), a_sample(8.0, 40)]
    fed = [a_sample(4.0, 10), a_sample(1.0, 10)]
    found = speedups(4, 1.0, fed, plain)
    assert found["wall_clock_speedup"] == pytest.approx((2 * 8) ** 0.5)
    assert found["wall_clock_speedup_interval"][0] < 4 < found["wall_clock_speedup_interval"][1]
    assert found["theoretical_speedup"] == pytest.approx(4.0)
    assert found["efficiency"] == pytest.approx(1.0)
    assert speedups(4, 1.0, plain, plain)["theoretical_speedup"] == pytest.approx(1.0)


def test_what_the_stages_wait_for_drafts_comes_off_the_theoretical_speedup() -> None:
    plain, fed = [a_sample(8.0, 40)] * 2, [a_sample(4.0, 10)] * 2
    found = speedups(4, 0.8, fed, plain)
    assert found["equivalent_acceptance_length"] == pytest.approx(4.0)
    assert found["theoretical_speedup"] == pytest.approx(0.8 * 4.0)
    assert found["efficiency"] == pytest.approx(2.0 / (0.8 * 4.0))


def test_completions_without_a_second_token_have_no_speed() -> None:
    plain = [a_sample(8.0, 40), a_sample(0.0, 0, [1])]
    found = speedups(4, 1.0, plain, plain)
    assert (found["wall_clock_speedup"], found["wall_clock_speedup_interval"]) == (1.0, None)
    none = speedups(4, 1.0, plain[1:], plain[1:])
    assert none["wall_clock_speedup"] is none["efficiency"] is none["equivalent_acceptance_length"] is None


def test_looping_outputs_are_left_out_of_the_acceptance_figures() -> None:
    looping = replace(a_sample(1.0, 10, [5] * 30))
    assert looping.looping
    found = acceptance([a_sample(1.0, 10), a_sample(1.0, 10), looping])
    assert found["draft_acceptance_rate"] == pytest.approx(0.25)
    assert found["mean_acceptance_length"] == pytest.approx(1 + 12 / 4)
    assert (found["decided_by_depth"], found["hit_by_depth"]) == ([16, 0, 4], [12, 0, 0])
    nothing = acceptance([looping])
    assert nothing["draft_acceptance_rate"] is None
    assert (nothing["decided_by_depth"], nothing["mean_acceptance_length"]) == ([], 1.0)


class FakeLLM:
    """Notes who runs how many tokens with which estimates."""

    def __init__(self) -> None:
        self.setup = SimpleNamespace(stages=2, cluster=None, speculator=None)
        self.loop = SimpleNamespace(use_estimates=self.use_estimates, drain=lambda: None, observers=[])
        self.drafter = None
        self.estimates = Estimates()
        self.runs: list[tuple[str, int, Estimates]] = []

    def use_estimates(self, estimates: Estimates) -> None:
        self.estimates = estimates

    def observe(self, observer: object) -> None:
        self.loop.observers.append(observer)

    def run(
        self, prompts: Sequence[str], params: Sequence[SamplingParams], config: SpeculativeConfig | None
    ) -> list[RequestOutput]:
        self.runs.append((config.strategy if config else "plain", params[0].max_tokens, self.estimates))
        for observer in self.loop.observers:
            observer.advanced(None, Advance(committed=[Node(1, 1, 1, 0)]), 1.0)
        completion = CompletionOutput(0, [1, 2, 3], seconds=2.0, first_token_seconds=1.0)
        return [RequestOutput("0", prompts[0], [1], [completion], finished=True)]


def test_each_strategy_warms_up_and_learns_from_its_own_runs_alone() -> None:
    """Plain decoding comes first wherever it is named: the synthetic drafter has to know its answers."""
    llm: Any = FakeLLM()
    entries = [
        ("auto", SpeculativeConfig()),
        ("autoregressive", None),
        ("pipedec", SpeculativeConfig(strategy="pipedec")),
    ]
    params = [SamplingParams(seed=seed, max_tokens=8) for seed in (0, 1)]
    runs = measure(llm, ["a", "b"], params, entries)
    order = ["plain", "auto", "pipedec"]
    assert [(name, tokens) for name, tokens, _ in llm.runs[:3]] == [(name, WARM_UP) for name in order]
    assert [(name, tokens) for name, tokens, _ in llm.runs[3:]] == [(name, 8) for name in [*order, *order]]
    learning = {name: {id(estimates) for who, _, estimates in llm.runs if who == name} for name in order}
    assert [len(own) for own in learning.values()] == [1, 1, 1]
    assert len(set.union(*learning.values())) == 3
    assert [(run.strategy, len(run.requests)) for run in runs] == [("autoregressive", 2), ("auto", 2), ("pipedec", 2)]
