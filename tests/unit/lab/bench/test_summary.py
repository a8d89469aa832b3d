"""A setting's figures from its samples."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.core import CompletionOutput, RequestOutput, SamplingParams, SpeculationMetrics
from penstock.lab.bench.meter import HitCounts
from penstock.lab.bench.summary import Sample, acceptance, speedups
from penstock.lab.grid import Question, Setting


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
