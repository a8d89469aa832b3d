"""The clusters that are emulated are those that are simulated, and stored figures of each stand beside the other's."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.papers import emulated_groups
from benchmarks.papers.tensor_groups import ALONE, TENSORS, cards
from penstock.lab.grid import PLAIN


def test_seven_groups_hold_the_layers_of_fourteen_cards() -> None:
    alone, groups = cards(ALONE), cards(TENSORS)
    assert [len(one.stages) for one in (alone, groups)] == [14, 7]
    assert [sum(sum(stage.layers) for stage in one.stages) for one in (alone, groups)] == [80, 80]
    assert {(len(stage.devices), stage.split) for stage in groups.stages} == {(2, "tensors")}


def test_a_row_has_both_in_milliseconds(monkeypatch: pytest.MonkeyPatch) -> None:
    def simulated(name: str, profile: str) -> dict[str, Any]:
        assert (name, profile) == (TENSORS, "profile")
        return {"ms": {PLAIN: 218.0, "pipedec": 60.0, "auto": 45.0}}

    monkeypatch.setattr(emulated_groups, "decoding", simulated)
    emulated = {"plain_seconds": 0.22, "seconds": 0.07, "standard_error": 0.001, "tokens": 99, "time_scale": 2.0}
    row = emulated_groups.row(TENSORS, {**emulated, "identical": True})
    assert row["simulated_ms"] == {"plain": 218.0, "pipedec": 60.0}
    assert row["emulated_ms"] == {"plain": 220.0, "pipedec": 70.0}
    assert row["error_ms"] == 1.0
