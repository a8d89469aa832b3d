"""PipeDec's formulas, on a cluster whose prices can be added up by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from penstock.cluster import draft_timing, link_timings, load_cluster, plain_step_seconds, stage_timings
from penstock.lab.bench.summary import formula_ms
from penstock.speculation import SpeculativeConfig

CLUSTER = load_cluster("pipedec-7")


def a_setup(depth: int | None = None, **others: Any) -> Any:
    speculator = None if depth is None else SimpleNamespace(depth=depth)
    return SimpleNamespace(**{"cluster": CLUSTER, "speculator": speculator, **others})


def config(strategy: str, **options: Any) -> SpeculativeConfig:
    return SpeculativeConfig(method="draft_model", model="small", strategy=strategy, **options)


@pytest.mark.parametrize("plain", [None, config("autoregressive")])
def test_plainly_all_stages_and_the_hops_between_them_add_up(plain: SpeculativeConfig | None) -> None:
    to_and_from_the_engine = sum(link_timings(CLUSTER)[i].seconds(1) for i in (0, -1))
    expected = 1e3 * (plain_step_seconds(CLUSTER) - to_and_from_the_engine)
    assert formula_ms(a_setup(), plain) == pytest.approx(expected)


def test_speculating_a_step_takes_what_the_slowest_takes() -> None:
    slowest = max(timing.seconds(32) for timing in stage_timings(CLUSTER))
    hop = max(timing.seconds(32) for timing in link_timings(CLUSTER)[1:-1])
    assert formula_ms(a_setup(), config("pipedec", width=32)) == pytest.approx(1e3 * (slowest + hop))
    assert formula_ms(a_setup(), config("pipedec", width=1)) < 1e3 * (slowest + hop), "C of fewer rows is less"


def test_a_drafter_that_takes_longer_than_a_stage_is_what_counts() -> None:
    slow = load_cluster("pipedec-7", draft_pass_ms=900)
    timing = draft_timing(slow)
    assert timing is not None
    found = formula_ms(a_setup(cluster=slow), config("pipedec", width=4))
    assert found == pytest.approx(1e3 * timing.seconds(4))
    looked_up = SpeculativeConfig(method="ngram", strategy="pipedec", width=4)
    assert formula_ms(a_setup(cluster=slow), looked_up) < found, "its answers are there at once"


def test_there_is_none_for_whole_trees_nor_where_nothing_is_emulated() -> None:
    assert formula_ms(a_setup(), config("flowspec")) is None
    assert formula_ms(a_setup(), config("static_tree")) is None
    assert formula_ms(a_setup(cluster=None), config("pipedec")) is None
    assert formula_ms(a_setup(cluster=load_cluster("local-2")), config("pipedec")) is None
