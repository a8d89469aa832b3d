"""PipeDec's Fig. 7 over several seeds: what sampling costs is paired by prompt."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.papers.pipedec_seeds import STRATEGIES, beside_static, costs, sampled_over_greedy


def of(greedy: dict[str, list[float]], sampled: dict[str, list[float]]) -> dict[str, Any]:
    return {"T0": {"ms": greedy}, "T0.6": {"ms": sampled}}


def test_a_prompt_counts_where_both_ways_have_an_output() -> None:
    found = of({"0": [10.0], "1": [20.0], "2": [5.0]}, {"0": [11.0, 13.0], "1": [10.0], "3": [1.0]})
    assert costs(found) == {"0": pytest.approx(1.2), "1": pytest.approx(0.5)}, "prompts 2 and 3 fell into a loop"
    ratio = sampled_over_greedy(found)
    assert ratio.mean == pytest.approx((1.2 * 0.5) ** 0.5)
    assert ratio.pairs == 2


def test_strategies_are_compared_on_the_prompts_that_both_have() -> None:
    own = of({"0": [10.0], "1": [10.0]}, {"0": [10.0], "1": [20.0]})
    static = of({"0": [10.0], "2": [10.0]}, {"0": [20.0], "2": [10.0]})
    ratio = beside_static(dict(zip(STRATEGIES, (own, static), strict=True)))
    assert (ratio.mean, ratio.pairs) == (pytest.approx(0.5), 1)
