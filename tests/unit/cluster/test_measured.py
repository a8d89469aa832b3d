"""Measured layers: what lies between the measurements, and what stages and plans make of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.cluster import load_cluster, stage_timings
from penstock.cluster.spec import LayerTimes, interpolated
from penstock.cluster.timing import Attended, MeasuredTiming, chunk, draft_timing
from penstock.config import FieldError
from penstock.lab.plan_choices import cluster_toml

TIMES = LayerTimes(
    rows=(1, 4),
    contexts=(0, 100),
    layer_ms=((1.0, 2.0), (4.0, 6.0)),
    stage_ms=(0.5, 0.75),
    head_ms=(10.0, 20.0),
)


@pytest.mark.parametrize(
    ("rows", "context", "wanted"),
    [(1, 0, 1.0), (4, 100, 6.0), (1, 50, 1.5), (2.5, 0, 2.5), (2.5, 50, 3.25), (7, 0, 7.0), (1, 200, 3.0)],
)
def test_between_four_measurements_and_beyond_them(rows: float, context: float, wanted: float) -> None:
    assert interpolated(TIMES.rows, TIMES.contexts, TIMES.layer_ms, rows, context) == pytest.approx(wanted)


def test_one_context_holds_for_all() -> None:
    assert interpolated((1, 4), (0,), ((1.0,), (4.0,)), 2, 999) == 2.0
    assert interpolated((1, 4), (0,), ((3.0,), (1.0,)), 9, 0) == 0.0, "no time is below 0"


def test_a_stage_is_its_layers_what_it_takes_beside_and_the_head() -> None:
    assert TIMES.of_stage((3,), head=False) == ((0.0035, 0.0065), (0.01275, 0.01875))
    assert TIMES.of_stage((1,), head=True)[1][0] == pytest.approx(0.02475)
    timing = MeasuredTiming(TIMES.rows, TIMES.contexts, TIMES.of_stage((3,), head=False))
    assert timing.seconds(0, Attended(0, 100)) == 0
    assert timing.seconds(4, chunk(4, cached=100)) == pytest.approx(0.01875)


def test_stages_on_measured_devices_take_what_was_measured_and_a_drafter_what_it_is_priced_at(tmp_path: Path) -> None:
    plain = load_cluster("demo")
    name = plain.stages[0].devices[0]
    devices = tuple(replace(one, measured=TIMES) if one.name == name else one for one in plain.devices)
    measured = replace(plain, devices=devices)
    first, *others = stage_timings(measured)
    wanted = plain.time_scale * TIMES.of_stage(plain.stages[0].layers, head=False)[0][0]
    assert first.seconds(1, chunk(1)) == pytest.approx(wanted)
    assert others == list(stage_timings(plain)[1:])
    assert draft_timing(measured) == draft_timing(plain)
    file = tmp_path / "measured.toml"
    file.write_text(cluster_toml(measured))
    assert stage_timings(load_cluster(str(file))) == (first, *others)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"rows": (4, 1)}, "rows is"),
        ({"contexts": ()}, "contexts is"),
        ({"layer_ms": ((1.0, 2.0),)}, "layer_ms is 1; it has to be as long as rows, 2"),
        ({"layer_ms": ((1.0,), (2.0,))}, r"layer_ms\[0\]"),
        ({"head_ms": (1.0, -1.0)}, "layer_ms is -1.0; it has to be 0 or above"),
    ],
)
def test_what_is_no_table_is_refused(change: dict[str, Any], problem: str) -> None:
    with pytest.raises(FieldError, match=problem):
        replace(TIMES, **change)
