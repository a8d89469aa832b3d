"""SPD's formulas, held to the figures that the paper prints."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from penstock.cluster import load_cluster
from penstock.lab.bench.summary import drafting_factor
from penstock.speculation import SpeculativeConfig
from penstock.strategies.base import STRATEGIES

LAYERS = 32


def a_setup(stages: int, depth: int, cluster: str | None = None) -> Any:
    return SimpleNamespace(
        stages=stages,
        speculator=SimpleNamespace(depth=depth),
        cluster=load_cluster(cluster) if cluster else None,
        checkpoint=SimpleNamespace(num_layers=LAYERS),
    )


def config(method: str, strategy: str, **options: Any) -> SpeculativeConfig:
    return SpeculativeConfig(method=method, model="drafter", strategy=strategy, **options)


@pytest.mark.parametrize(
    ("method", "strategy", "options", "stages", "depth", "length", "speedup"),
    [
        ("spd", "pipedec", {}, 8, 4, 2.82, 2.82),
        ("spd", "pipedec", {}, 16, 2, 2.83, 2.83),
        ("early_exit", "pipedec", {}, 4, 1, 1.67, 1.49),
        ("early_exit", "pipedec", {}, 16, 1, 1.93, 1.29),
        ("eagle3", "static_tree", {"tree_depth": 7}, 8, 1, 3.32, 2.72),
        ("eagle3", "static_tree", {"tree_depth": 15}, 16, 1, 4.90, 3.33),
        ("eagle3", "pipedec", {}, 8, 1, 2.0, 2.0),
    ],
)
def test_the_formulas_give_what_table_1_prints(
    method: str, strategy: str, options: dict[str, Any], stages: int, depth: int, length: float, speedup: float
) -> None:
    factor = drafting_factor(a_setup(stages, depth), config(method, strategy, **options))
    assert length * factor == pytest.approx(speedup, abs=0.011)


def test_a_module_that_reads_output_states_is_waited_for() -> None:
    """Table 2: 3.66 / 1.83 with two layers at sixteen stages. A module that knows no other way is refused without the
    option (test_learned.py)."""
    factor = drafting_factor(a_setup(16, 2), config("spd", "pipedec", post_state=True))
    assert 3.66 * factor == pytest.approx(1.83, abs=0.011)


@pytest.mark.parametrize(("stages", "depth", "factor"), [(8, 4, 1.0), (16, 4, 0.5), (4, 12, 32 / 48), (16, 3, 32 / 48)])
def test_every_step_waits_for_a_module_that_takes_longer_than_a_stage(stages: int, depth: int, factor: float) -> None:
    """Section 3.4's condition, which Table 1's own rows all fulfil."""
    assert drafting_factor(a_setup(stages, depth), config("spd", "pipedec")) == pytest.approx(factor)


def test_the_emulated_models_layers_count() -> None:
    setup = a_setup(8, 1, cluster="two-servers")
    assert drafting_factor(setup, config("eagle", "static_tree", tree_depth=4)) == pytest.approx(80 / 84)


def test_nothing_is_taken_off_where_the_paper_has_no_formula() -> None:
    setup = a_setup(8, 1)
    assert drafting_factor(setup, None) == 1
    setup.speculator = None
    assert drafting_factor(setup, SpeculativeConfig(strategy="static_tree")) == 1


@pytest.mark.parametrize("method", ["eagle", "eagle3", "medusa", "spd", "dflash", "dspark", "headrace", "peagle"])
@pytest.mark.parametrize("strategy", [name for name, kind in STRATEGIES.items() if kind.drafts])
def test_heads_without_a_layer_hold_up_nothing(method: str, strategy: str) -> None:
    assert drafting_factor(a_setup(8, 0), config(method, strategy)) == 1
