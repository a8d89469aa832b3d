"""Modelled times against arithmetic done by hand, and against the papers' settings."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cluster import (
    PRICES,
    Attended,
    Cluster,
    DeviceTiming,
    LinkTiming,
    StageTiming,
    draft_link,
    draft_timing,
    feature_links,
    link_timings,
    load_cluster,
    plain_step_seconds,
    speculator_timing,
    stage_timings,
)
from penstock.cluster.load import ClusterFile, resolve
from penstock.cluster.spec import llama
from penstock.cluster.timing import chunk
from penstock.config import FieldError, parse
from penstock.core import ConfigError
from tests.unit.cluster.sample import EMULATED

# EMULATED: a1 | a2 b1, two layers of 0.5e9 parameters x 2 bytes each; 100 GB/s, 1 TFLOPS, 1 ms; head 0.25e9 on b1.
# Reading: 2e9 bytes / 100e9 = 20 ms, with the head 25 ms. A row: 2 x 1e9 / 1e12 = 2 ms, with the head 2.5 ms.
# A hidden state: 1000 x 2 bytes. Links: local 10e9 bytes/s and 0.01 ms, network 1e9 bytes/s and 0.1 ms.


def cluster(time_scale: float = 1.0) -> Cluster:
    return resolve(parse(ClusterFile, {**EMULATED, "time_scale": time_scale}))


def test_stage_times_by_hand() -> None:
    first, second = stage_timings(cluster())
    assert first.seconds(1) == pytest.approx(0.001 + 0.020)
    assert first.seconds(10) == pytest.approx(0.001 + 0.020)  # 10 rows x 2 ms: reading and computing are equal
    assert first.seconds(32) == pytest.approx(0.001 + 0.064)
    inner = 0.0001 + 32 * 2000 / 1e9
    assert second.seconds(32) == pytest.approx((0.001 + 0.064) + inner + (0.001 + 0.080))
    assert second.seconds(1) == pytest.approx(0.021 + 0.026 + 0.0001 + 2000 / 1e9)


def test_a_batch_without_rows_costs_no_computing() -> None:
    first, second = stage_timings(cluster())
    assert first.seconds(0) == 0.0
    assert second.seconds(0) == pytest.approx(0.0001)  # its header crosses the link inside the stage


def test_link_times_by_hand() -> None:
    enter, between, leave = link_timings(cluster())
    assert enter.seconds(32) == pytest.approx(0.0001 + 32 * 24 / 1e9)  # d on host b to a1 on host a
    assert between.seconds(32, header_bytes=1000) == pytest.approx(0.00001 + (32 * 2000 + 1000) / 10e9)
    assert leave.seconds(1) == pytest.approx(0.00001 + 24 / 10e9)  # b1 and d share a host


def test_plain_step_is_one_row_all_the_way() -> None:
    stages = 0.021 + (0.021 + 0.0001 + 2000 / 1e9 + 0.026)
    links = (0.0001 + 24 / 1e9) + (0.00001 + 2000 / 10e9) + (0.00001 + 24 / 10e9)
    assert plain_step_seconds(cluster()) == pytest.approx(stages + links)


def test_drafter_by_hand() -> None:
    draft = draft_timing(cluster())
    assert draft is not None
    assert draft.seconds(1) == pytest.approx(0.001 + (12 * 9_438_720 + 32000 * 768 + 768) * 2 / 100e9)
    link = draft_link(cluster())
    assert link is not None
    assert link.seconds(1000) == 0.0  # on the engine's own device


def test_engine_apart_from_the_drafter() -> None:
    apart = resolve(parse(ClusterFile, {**EMULATED, "engine": "b1"}))
    link = draft_link(apart)
    assert link is not None
    assert link.seconds(1) == pytest.approx(0.00001 + 24 / 10e9)
    assert link_timings(apart)[-1].seconds(1) == 0.0  # the last stage is on the engine's device


def test_a_learned_drafter_takes_its_own_number_of_layers_and_the_head() -> None:
    for depth, parameters in ((0, 0.25e9), (1, 0.75e9), (4, 2.25e9)):
        timing = speculator_timing(cluster(), depth)
        assert timing is not None
        assert timing.seconds(1) == pytest.approx(0.001 + parameters * 2 / 100e9)
        assert timing.seconds(1000) == pytest.approx(0.001 + 1000 * 2 * parameters / 1e12)
    measured = resolve(parse(ClusterFile, {**EMULATED, "draft_pass_ms": 7, "time_scale": 2.0}))
    for timing in (speculator_timing(measured, 4), draft_timing(measured)):
        assert timing is not None
        assert timing.seconds(1) == pytest.approx(2 * 0.007)


def test_messages_follow_the_drafter_to_a_stages_device() -> None:
    placed = resolve(parse(ClusterFile, {**EMULATED, "drafter": "b1", "engine": "d"}))
    first, last = feature_links(placed)
    assert first.seconds(3) == pytest.approx(0.0001 + 3 * 2000 / 1e9)
    assert last.seconds(1000, 500) == 0.0, "within the device"
    link = draft_link(placed)
    assert link is not None
    assert link.seconds(1) == pytest.approx(0.00001 + 24 / 10e9)


def test_a_measured_pass_takes_the_place_of_reading_and_overhead() -> None:
    measured = {"pass_ms": 30, "compute_tflops": 1}
    first, _ = stage_timings(resolve(parse(ClusterFile, {**EMULATED, "kinds": {"gpu": measured}, "time_scale": 2.0})))
    assert first.seconds(15) == pytest.approx(2 * 0.030)  # 15 rows x 2 ms: measured and computed are equal
    assert first.seconds(32) == pytest.approx(2 * 0.064)
    assert first.seconds(0) == 0.0


def test_time_scale_stretches_everything_alike() -> None:
    for one, three in zip(stage_timings(cluster()), stage_timings(cluster(3.0)), strict=True):
        assert three.seconds(40) == pytest.approx(3 * one.seconds(40))
    for slow, fast in zip(link_timings(cluster(3.0)), link_timings(cluster()), strict=True):
        assert slow.seconds(40, 100) == pytest.approx(3 * fast.seconds(40, 100))
    assert plain_step_seconds(cluster(3.0)) == pytest.approx(3 * plain_step_seconds(cluster()))


def test_nothing_emulated_has_no_times() -> None:
    local = load_cluster("local-2")
    for function in (stage_timings, link_timings, plain_step_seconds):
        with pytest.raises(ConfigError, match="local-2 has no as_model"):
            function(local)
    assert draft_timing(local) is None
    assert draft_link(local) is None


def test_prices_are_the_published_parameter_counts() -> None:
    totals = {
        name: p.layers * p.layer_parameters + p.head_parameters + p.embedding_parameters for name, p in PRICES.items()
    }
    assert totals == {
        "llama-3.1-70b-fp32": 70_553_706_496,
        "llama-3.1-70b-bf16": 70_553_706_496,
        "llama-3.2-1b-fp32": 1_235_814_400,
        "llama-2-7b-fp16": 6_738_415_616,
        "llama-2-7b-4bit": 6_738_415_616,
        "llama-2-13b-4bit": 13_015_864_320,
        "tinyllama-1.1b-fp16": 1_100_048_384,
        "llama-160m-fp16": 162_417_408,
        # 0.24, 0.37 and 0.99e9 of their own, and the target's embedding and head
        "eagle-llama-2-7b-fp16": 235_937_792 + 2 * 32000 * 4096,
        "eagle-llama-2-13b-fp16": 369_633_280 + 2 * 32000 * 5120,
        "eagle-llama-3.1-70b-bf16": 989_872_128 + 2 * 128256 * 8192,
        "medusa-head-llama-2-7b-fp16": 4096 * 4096 + 4096 + 32000 * 4096,
    }


def test_the_precision_is_the_one_in_the_name() -> None:
    bits = {"fp32": (32, 4), "fp16": (16, 2), "bf16": (16, 2), "4bit": (4.5, 2)}
    for name, price in PRICES.items():
        assert (8 * price.bytes_per_parameter, price.activation_bytes) == bits[name.rpartition("-")[2]], name


def test_a_price_has_a_precision_that_is_modelled() -> None:
    with pytest.raises(FieldError, match="bits is 8; it has to be 4, 16 or 32"):
        llama(layers=1, hidden=8, intermediate=8, key_value=8, vocabulary=8, bits=8)


def test_pipedec_as_published() -> None:
    """~20 GB for six layers, ~13 GB for four (section 4.1); the same plain pipeline in groups of one and of two."""
    price = PRICES["llama-3.1-70b-fp32"]
    assert price.weight_bytes(range(6), head=False) / 1e9 == pytest.approx(20.5, abs=0.1)
    assert price.weight_bytes(range(4), head=False) / 1e9 == pytest.approx(13.7, abs=0.1)
    fourteen, seven = load_cluster("pipedec-14x3090"), load_cluster("pipedec-7")
    assert plain_step_seconds(fourteen) == pytest.approx(plain_step_seconds(seven), rel=1e-3)
    layers = [sum(stage.layers) for stage in fourteen.stages]
    assert (layers.count(6), layers.count(4)) == (12, 2)
    layers = [sum(stage.layers) for stage in load_cluster("pipedec-21").stages]
    assert (layers.count(4), layers.count(2)) == (19, 2)


def test_flowspec_as_published() -> None:
    """Table 1 and appendix A.1: a round of naive PP brings 3 to 5 tokens, the 13B's lasts 6.14 / 1.30 as long.

    A round: 6 draft passes, then 5 segments of 16 rows behind one another (a tree of 80).
    """
    rounds = {}
    for name in ("flowspec-7b", "flowspec-13b"):
        cluster = load_cluster(name)
        stages, draft = stage_timings(cluster), draft_timing(cluster)
        assert draft is not None
        through = sum(part.seconds(16) for part in (*stages, *link_timings(cluster)))
        rounds[name] = 6 * draft.seconds(10) + through + 4 * max(stage.seconds(16) for stage in stages)
    assert 3 < 6.14 * rounds["flowspec-7b"] < 5
    assert rounds["flowspec-13b"] / rounds["flowspec-7b"] == pytest.approx(6.14 / 1.30, rel=0.02)


@pytest.mark.parametrize(("name", "published"), [("jupiter-homogeneous", 38.6), ("jupiter-heterogeneous", 55.7)])
def test_jupiter_as_published(name: str, published: float) -> None:
    """Table IV, EdgeShard (the plain pipeline) at 1 Gbps: 260 prompt tokens and 64 new ones."""
    cluster = load_cluster(name, bandwidth_gbit_s=0.94)
    prompt = sum(part.seconds(260) for part in (*stage_timings(cluster), *link_timings(cluster)))
    assert prompt + 64 * plain_step_seconds(cluster) == pytest.approx(published, rel=0.03)
    times = [stage.seconds(1) for stage in stage_timings(cluster)]
    assert max(times) < 1.1 * min(times), "layers in proportion to speed"


@pytest.mark.parametrize(("stages", "stage_ms", "draft_ms"), [(4, 8.05, 4.15), (8, 4.07, 3.50), (16, 2.08, 3.18)])
def test_spd_as_measured(stages: int, stage_ms: float, draft_ms: float) -> None:
    cluster = load_cluster(f"spd-{stages}")
    draft = draft_timing(cluster)
    assert draft is not None
    assert draft.seconds(1) == pytest.approx(draft_ms / 1e3)
    times = [stage.seconds(rows) for stage in stage_timings(cluster) for rows in (1, 64)]
    assert times == pytest.approx([stage_ms / 1e3] * 2 * stages)


def test_two_servers_beside_the_report() -> None:
    """Table 3, 8 stages: a round of 78 ms (11.42 s, 256 tokens, 1.75 a round), the drafter's passes included."""
    cluster = load_cluster("two-servers")
    assert 0.8 * 0.078 < plain_step_seconds(cluster) < 0.078
    assert [cluster.device(stage.devices[0]).host for stage in cluster.stages] == ["server-a"] * 4 + ["server-b"] * 4


@pytest.mark.parametrize("name", ["demo", "pipedec-7", "pipedec-14x3090", "pipedec-21"])
def test_presets_can_be_emulated_on_a_small_computer(name: str) -> None:
    """A stage has to outlast this computer's own work on a batch; 32 rows ride along for nothing, as PipeDec needs.

    A draft pass has to outlast the small model's own, and to hide behind a stage.
    """
    preset = load_cluster(name)
    stages = stage_timings(preset)
    assert min(stage.seconds(1) for stage in stages) > 0.010
    assert max(stage.seconds(32) for stage in stages) < 1.1 * max(stage.seconds(1) for stage in stages)
    draft = draft_timing(preset)
    assert draft is not None
    assert 0.005 < draft.seconds(32) < max(stage.seconds(1) for stage in stages)


finite = st.floats(0, 1e9)
links = st.builds(LinkTiming, finite, st.floats(1, 1e12) | st.just(math.inf), finite)
devices = st.builds(DeviceTiming, finite, finite, finite)
stages = st.builds(
    StageTiming, st.lists(devices, min_size=1, max_size=3).map(tuple), st.lists(links, max_size=2).map(tuple)
)


@given(stages, st.integers(0, 256), st.integers(0, 256))
def test_stage_times_cross_the_wire_and_grow_with_rows(stage: StageTiming, some: int, more: int) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(stage), type=StageTiming) == stage
    assert stage.seconds(some) <= stage.seconds(some + more)


def test_attention_by_hand() -> None:
    """A layer: 4 x 1000 operations a pair, 2 x 1000 x 2 bytes a token; two layers on the first stage, 1 TFLOPS."""
    first, second = stage_timings(cluster())
    seen = chunk(1000, cached=5000)
    pairs, slots = 1000 * 5000 + 1000 * 1001 / 2, 6000
    assert first.seconds(1000, seen) == pytest.approx(0.001 + 1000 * 0.002 + pairs * 8000 / 1e12)
    one = Attended(pairs=6000, slots=6000)
    assert first.seconds(1, one) == pytest.approx(0.001 + 0.020 + slots * 8000 / 100e9)
    assert second.seconds(1, one) - second.seconds(1) == pytest.approx(2 * slots * 8000 / 100e9)
    slow = stage_timings(cluster(3.0))[0]
    assert slow.seconds(1000, seen) == pytest.approx(3 * first.seconds(1000, seen))


def test_half_a_chunk_no_longer_costs_half() -> None:
    """With attention the second half of a long text takes longer than the first."""
    (first, *_) = stage_timings(load_cluster("jupiter-homogeneous"))
    assert first.seconds(2048, chunk(2048, 2048)) > 1.02 * first.seconds(2048, chunk(2048))
