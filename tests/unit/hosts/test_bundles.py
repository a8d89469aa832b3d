"""A reservation takes the fewest of Ray's nodes that hold the stages evenly."""

from __future__ import annotations

import pytest

from penstock.core import ConfigError
from penstock.hosts.ray import bundles_for

CPUS = {"CPU": 8.0, "memory": 1e9}
GPUS = {"CPU": 32.0, "GPU": 4.0}


@pytest.mark.parametrize(
    ("nodes", "stages", "device", "expected"),
    [
        ([CPUS, CPUS, CPUS], 2, "cpu", [{"CPU": 1.0}] * 2),
        ([CPUS, {"CPU": 0.0}, CPUS], 4, "cpu", [{"CPU": 1.0}] * 2),
        ([GPUS, GPUS], 4, "cuda", [{"GPU": 4.0}]),
        ([GPUS, GPUS], 6, "cuda", [{"GPU": 3.0}] * 2),
        ([GPUS, CPUS, GPUS, GPUS], 12, "cuda", [{"GPU": 4.0}] * 3),
        ([CPUS, {**CPUS, "penstock": 2.0}, {**CPUS, "penstock": 1.0}], 2, "cpu", [{"penstock": 2.0}]),
        ([{**CPUS, "penstock": 1.0}, {**CPUS, "penstock": 1.0}], 2, "cpu", [{"penstock": 1.0}] * 2),
    ],
)
def test_a_bundle_for_each_node_that_is_needed(
    nodes: list[dict[str, float]], stages: int, device: str, expected: list[dict[str, float]]
) -> None:
    assert bundles_for(nodes, stages, device) == expected


@pytest.mark.parametrize(
    ("nodes", "stages", "device", "said"),
    [
        ([CPUS], 1, "cuda", r"1 stages need GPUs evenly on Ray's nodes, which have \[0\]"),
        ([GPUS, GPUS], 9, "cuda", r"9 stages need GPUs .* have \[4, 4\]"),
        ([{**CPUS, "penstock": 1.0}], 2, "cpu", "2 stages need penstocks"),
        ([{"CPU": 0.0}], 1, "cpu", "1 stages need CPUs"),
        ([], 1, "cpu", "have"),
    ],
)
def test_too_few_are_refused_with_the_numbers(
    nodes: list[dict[str, float]], stages: int, device: str, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        bundles_for(nodes, stages, device)
