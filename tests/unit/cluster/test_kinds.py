"""Layers that differ: prices by kind, what a device with some of them takes and holds, and the plans that follow."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st

from penstock.cluster import load_cluster, stage_timings
from penstock.cluster.spec import Cluster, LayerKind, LayerTimes, ModelPrice
from penstock.cluster.timing import chunk, device_timing, held_by
from penstock.config import FieldError
from penstock.core import ConfigError
from penstock.engine.options import EngineOptions
from penstock.engine.profile.measure import price_of, slot_bytes
from penstock.engine.resolve import resolve_options
from penstock.lab.plan_choices import cluster_toml
from penstock.lab.profile import times_on
from penstock.planner.costs import Batch, problem_of
from penstock.planner.partition import least_slowest
from tests.checkpoints import make_checkpoint
from tests.unit.cluster.sample import EMULATED, MODEL

ATTENDS = LayerKind()
CARRIES = LayerKind(layer_parameters=200_000_000, attention_size=0, key_value_size=0, state_bytes=4e6, held_slots=1024)
NEAR = LayerKind(reach=512, held_slots=600)
HYBRID = ModelPrice(
    layers=8,
    hidden_size=1024,
    layer_parameters=500_000_000,
    head_parameters=0,
    kinds=(CARRIES, ATTENDS, NEAR),
    pattern=(0, 0, 2, 1),
)


@given(st.integers(0, 8), st.integers(0, 8), st.booleans())
def test_a_range_of_layers_is_the_sum_of_them(one: int, other: int, near: bool) -> None:
    first, last = sorted((one, other))
    layers = range(first, last)
    alone = [range(layer, layer + 1) for layer in layers]
    assert HYBRID.weight_bytes(layers, head=True) == sum(HYBRID.weight_bytes(each, head=False) for each in alone)
    for value in (HYBRID.pair_operations, HYBRID.slot_bytes):
        assert value(layers, near=near) == sum(value(each, near=near) for each in alone)
    assert HYBRID.state_bytes(layers) == sum(map(HYBRID.state_bytes, alone))
    assert HYBRID.held_bytes(layers, 2000) == sum(HYBRID.held_bytes(each, 2000) for each in alone)
    assert HYBRID.counts(layers) == tuple(sum(HYBRID.layer_kinds[i] == kind for i in layers) for kind in range(3))


def test_kinds_that_are_all_as_the_model_change_nothing() -> None:
    plain = replace(HYBRID, kinds=(), pattern=())
    alike = replace(HYBRID, kinds=(ATTENDS, ATTENDS), pattern=(0, 1, 1))
    device = load_cluster("demo").devices[0]
    for layers in (range(8), range(3, 5)):
        timings = [device_timing(device, model, layers, 1.0, head=True) for model in (plain, alike)]
        assert timings[0] == timings[1]
        held = [held_by(model, layers, 4096, embedding=True, head=True) for model in (plain, alike)]
        assert held[0] == held[1]


def test_a_layer_holds_keys_of_its_slots_or_states() -> None:
    carries, near, attends = (range(i, i + 1) for i in (0, 2, 3))
    token = 2 * 1024 * 2
    assert HYBRID.held_bytes(attends, 4096) == 4096 * token
    assert HYBRID.held_bytes(near, 4096) == 600 * token
    assert HYBRID.held_bytes(carries, 4096) == 1024 * 4e6
    assert HYBRID.held_bytes(carries, 100) == 100 * 4e6


def test_a_window_bounds_what_attention_takes_and_a_state_takes_the_same_behind_any_text() -> None:
    device = replace(load_cluster("demo").devices[0], weight_bandwidth_gb_s=1.0, compute_tflops=1.0, overhead_ms=0.0)

    def seconds(layer: int, context: int) -> float:
        timing = device_timing(device, HYBRID, range(layer, layer + 1), 1.0, head=False)
        return timing.seconds(1, chunk(1, context))

    assert seconds(0, 0) == seconds(0, 9000) == pytest.approx(0.4 + 2 * 4e6 / 1e9)
    assert seconds(2, 400) == seconds(3, 400)
    assert seconds(2, 9000) == pytest.approx(seconds(3, 511))
    assert seconds(3, 9000) > seconds(3, 511)


def cluster_of(model: ModelPrice, **changed: Any) -> Cluster:
    plain = load_cluster("demo")
    devices = tuple(replace(device, memory_gb=None, **changed) for device in plain.devices)
    return replace(plain, devices=devices, as_model=model, draft_as_model=None, drafter=None)


@pytest.mark.parametrize("pattern", [(0, 0, 1), (1, 0, 0, 0, 0, 0, 0, 0), (0, 0, 2, 1)])
def test_a_plan_weighs_layers_by_their_kind(pattern: tuple[int, ...]) -> None:
    """The slowest stage is as fast as any cut allows: every cut is tried."""
    model = replace(HYBRID, pattern=pattern)
    cluster = cluster_of(model)
    devices, batch = cluster.devices[:3], Batch(1, 2048)
    problem = problem_of(cluster, devices, batch)
    found = least_slowest(problem, range(3))
    assert found is not None

    def slowest(cuts: tuple[int, ...]) -> float:
        ends = (0, *cuts, model.layers)
        stages = [
            device_timing(device, model, range(first, last), cluster.time_scale, head=last == model.layers)
            for device, first, last in zip(devices, ends, ends[1:], strict=False)
        ]
        return max(stage.seconds(1, batch.attended) for stage in stages)

    assert problem.slowest_s(found) == pytest.approx(min(map(slowest, combinations(range(1, model.layers), 2))))


def test_a_file_names_kinds_and_a_written_plan_keeps_them(tmp_path: Path) -> None:
    device = load_cluster("demo").devices[0]
    times = times_on(device, HYBRID, 1.0)
    cluster = cluster_of(HYBRID, measured=times)
    stages = tuple(replace(stage, layers=(2,)) for stage in cluster.stages[:4])
    cluster = replace(cluster, stages=stages)
    file = tmp_path / "hybrid.toml"
    file.write_text(cluster_toml(cluster))
    assert stage_timings(load_cluster(str(file))) == stage_timings(cluster)
    first, second, *_ = (timing.seconds(1, chunk(1, 100)) for timing in stage_timings(cluster))
    assert second > 1.5 * first, "two layers that attend beside two that carry states"


def test_priced_layers_have_times_by_kind_and_their_mean() -> None:
    device = load_cluster("demo").devices[0]
    found = times_on(device, HYBRID, 1.0)
    assert len(found.kind_ms) == 3
    counts = HYBRID.counts(HYBRID.all_layers)
    assert counts == (4, 2, 2)
    mean = sum(count * grid[0][0] for count, grid in zip(counts, found.kind_ms, strict=True)) / 8
    assert found.layer_ms[0][0] == pytest.approx(mean)
    assert found.of_stage(counts, head=False)[0][0] == pytest.approx((found.stage_ms[0] + 8 * mean) / 1e3)


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"pattern": (0, 3)}, r"pattern is \[0, 3\]; it has to be places in kinds, which has 3"),
        ({"pattern": ()}, "pattern is"),
        ({"kinds": ()}, "pattern is"),
        ({"kinds": (NEAR, LayerKind(reach=9)), "pattern": (0, 1)}, r"kinds is \[9, 512\]; it has to be of one reach"),
    ],
)
def test_kinds_that_do_not_fit_their_pattern_are_refused(changed: dict[str, Any], problem: str) -> None:
    with pytest.raises(FieldError, match=problem):
        replace(HYBRID, **changed)


def test_times_by_kind_have_the_shape_of_the_others() -> None:
    with pytest.raises(FieldError, match=r"kind_ms\[1\] is 0; it has to be as long as rows, 1"):
        LayerTimes(
            rows=(1,), contexts=(0,), layer_ms=((1.0,),), stage_ms=(0.0,), head_ms=(0.0,), kind_ms=(((1.0,),), ())
        )


def test_ranks_do_not_share_layers_that_differ(tmp_path: Path) -> None:
    model = {**MODEL, "kinds": [{"layer_parameters": 1_000_000}], "pattern": [0]}
    groups = [{"devices": ["a1", "a2"], "split": "tensors"}]
    file = tmp_path / "groups.toml"
    file.write_text(tomli_w.dumps({**EMULATED, "as_model": model, "stages": groups}))
    with pytest.raises(ConfigError, match=r"as_model\.kinds says that layers differ"):
        load_cluster(str(file))


@pytest.mark.parametrize(
    ("architecture", "kinds"), [("qwen3_5", 2), ("gemma3", 2), ("lfm2", 2), ("deepseek_v3", 2), ("llama", 0)]
)
@pytest.mark.parametrize("shares", [True, False])
def test_a_checkpoints_price_holds_what_its_layers_do(
    architecture: str, kinds: int, shares: bool, tmp_path: Path
) -> None:
    """Weights and slots of any layers come to those of the footprint, which counts each layer by itself."""
    folder = str(make_checkpoint(tmp_path, architecture))
    given = EngineOptions(
        model=folder, max_model_len=64, kv_slots=2048, speculative_config=None, enable_prefix_caching=shares
    )
    setup = resolve_options(given)
    found, kept = price_of(setup), slot_bytes(setup)
    assert len(found.kinds) == kinds
    for layers in (range(5), range(1, 3), range(4, 5)):
        held = found.held_bytes(layers, setup.capacity)
        assert held == pytest.approx(sum(kept[layers.start : layers.stop]))
