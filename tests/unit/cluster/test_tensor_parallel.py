"""Tensor parallel stages: shares, prices and exchange against arithmetic done by hand, and what a file may say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st

from penstock.cluster import PRICES, Cluster, StageTiming, feature_links, link_timings, load_cluster, stage_timings
from penstock.cluster.drawn import uniform_cluster
from penstock.cluster.load import ClusterFile, load_devices, resolve, with_drafter_on
from penstock.cluster.spec import ModelPrice, llama
from penstock.cluster.timing import (
    Exchange,
    GroupTiming,
    check_divisible,
    exchange_of,
    held_by_part,
    rank_prices,
    shares_of,
)
from penstock.config import FieldError, parse
from penstock.hosts.placement import hosts_of_ranks
from tests.unit.cluster.sample import EMULATED, KIND

# A layer of SMALL: q, k, v 64 x (64 + 2 x 32) = 8,192 parameters, o 4,096, down 8,192, gate and up 16,384, norms 128.
# Its rows have 64 elements of 2 bytes, 4 blocks of 16; the opened row 128 elements, 8 blocks; the head 1,025 outputs
# with its norm, 65 blocks, the last of one output.
SMALL = llama(layers=4, hidden=64, intermediate=128, key_value=32, key_value_heads=2, vocabulary=1024, bits=16)
EQUAL = (1.0, 1.0)
PRICED = {"layers": 6, "hidden_size": 1024, "layer_parameters": 500_000_000, "head_parameters": 250_000_000}
MODEL = {**PRICED, "key_value_heads": 8, "intermediate_size": 4096, "embedding_parameters": 250_000_000}
JOINED: dict[str, Any] = {
    **EMULATED,
    "as_model": MODEL,
    "stages": [{"devices": ["a1", "a2"], "split": "tensors", "layers": 4}, {"devices": ["b1"], "layers": 2}],
}


def load(**changes: Any) -> Cluster:
    return resolve(parse(ClusterFile, {**JOINED, **changes}))


def group_of(cluster: Cluster, index: int = 0) -> GroupTiming:
    (found,) = stage_timings(cluster)[index].devices
    assert isinstance(found, GroupTiming)
    return found


# --------------------------------------------------------------------------------------------------------------- shares


def test_two_equal_ranks_have_half_of_everything() -> None:
    assert shares_of(SMALL, EQUAL) == ((1, 1), (2, 2), (4, 4), (33, 32))
    first, second = rank_prices(SMALL, EQUAL)
    assert first.layer_parameters == second.layer_parameters == 4096 + (4096 + 8192) // 2 + (16384 + 128) // 2
    assert (first.attention_size, first.key_value_size) == (32, 16)
    assert (first.head_parameters, second.head_parameters) == (65_600 * 33 // 65, 65_600 - 65_600 * 33 // 65)
    assert (first.embedding_parameters, second.embedding_parameters) == (65_536, 0), "the leader looks tokens up"


def test_kv_groups_are_not_divided() -> None:
    """SmolLM2-135M: nine heads in three groups. All else is in blocks, of which there are enough for even halves."""
    smol = llama(layers=30, hidden=576, intermediate=1536, key_value=192, key_value_heads=3, vocabulary=49152, bits=32)
    assert shares_of(smol, EQUAL) == ((2, 1), (18, 18), (48, 48), (1537, 1536))
    first, second = rank_prices(smol, EQUAL)
    assert (first.attention_size, second.attention_size) == (384, 192)
    assert first.slot_bytes(range(30)) == 2 * second.slot_bytes(range(30))


def test_a_faster_rank_has_more() -> None:
    price = PRICES["llama-3.1-70b-bf16"]
    assert shares_of(price, (3.0, 1.0)).heads == (6, 2)
    fast, slow = rank_prices(price, (3.0, 1.0))
    assert fast.layer_parameters / slow.layer_parameters == pytest.approx(3, rel=0.01)


def test_a_row_crosses_the_link_in_four_gathers_a_layer() -> None:
    """Two ranks: half of 64 attended, 128 opened and twice 64 hidden elements of 2 bytes. The row is handed out
    when it comes in, and again before the head."""
    layer = (64 + 128 + 2 * 64) * 2 / 2
    assert exchange_of(SMALL, EQUAL, 4, head=False) == Exchange(1 + 4 * 4, 128 + 4 * layer)
    messages, row_bytes = exchange_of(SMALL, EQUAL, 4, head=True)
    assert messages == 1 + 4 * 4 + 2
    assert row_bytes == pytest.approx(2 * 128 + 4 * layer + 33 / 65 * 1025 * 2)
    assert exchange_of(SMALL, (1.0,), 4, head=True) == (0, 0.0)


def test_bytes_of_a_7b_in_float32_and_in_eight_bits() -> None:
    """93 kB a row and layer; 50 kB where attended and opened rows keep the eight bits that int8 multiplies in."""
    whole = llama(layers=1, hidden=4096, intermediate=11008, key_value=4096, key_value_heads=32, vocabulary=16, bits=32)
    for gathered, expected in ((None, 93_184), (1.125, 49_760)):
        model = replace(whole, gathered_bytes=gathered)
        for ranks in (2, 4):
            _, crossing = exchange_of(model, (1.0,) * ranks, 1, head=False)
            # The row that comes in goes to every other rank; of what is gathered a rank lacks all but its own share.
            assert crossing == pytest.approx((ranks - 1) * (4 * 4096 + expected / ranks))


@st.composite
def divided(draw: st.DrawFn) -> tuple[ModelPrice, tuple[float, ...]]:
    """A model of at least eight blocks everywhere, and ranks of unlike speed, at most one for each of its KV groups."""
    groups = draw(st.integers(1, 8))
    model = ModelPrice(
        layers=9,
        hidden_size=draw(st.integers(128, 700)),
        layer_parameters=draw(st.integers(10**7, 10**8)),
        head_parameters=draw(st.integers(128 * 700, 10**7)),
        embedding_parameters=draw(st.integers(0, 10**7)),
        attention_size=groups * draw(st.integers(2, 6)) * 64,
        key_value_size=groups * 64,
        key_value_heads=groups,
        intermediate_size=draw(st.integers(128, 3000)),
    )
    return model, tuple(draw(st.lists(st.floats(1, 5), min_size=1, max_size=groups)))


@given(divided())
def test_shares_are_the_whole_model(case: tuple[ModelPrice, tuple[float, ...]]) -> None:
    model, speeds = case
    check_divisible(model, len(speeds), "devices")
    ranks = rank_prices(model, speeds)
    for name in ("layer_parameters", "head_parameters", "embedding_parameters"):
        assert sum(getattr(rank, name) for rank in ranks) == getattr(model, name)
    assert sum(rank.queries for rank in ranks) == model.queries
    assert sum(rank.keys for rank in ranks) == model.keys
    assert all(min(units) >= 1 for units in shares_of(model, speeds))


@given(divided(), st.integers(1, 9))
def test_a_rank_sends_at_least_an_equal_share_to_every_other(
    case: tuple[ModelPrice, tuple[float, ...]], layers: int
) -> None:
    model, speeds = case
    less, more = (exchange_of(model, speeds, n, head=False) for n in (layers, layers + 1))
    assert less < more or len(speeds) == 1
    assert model.intermediate_size is not None
    gathered = 2 * (model.queries + model.intermediate_size + 2 * model.hidden_size)
    share = (len(speeds) - 1) / len(speeds)
    assert (more.row_bytes - less.row_bytes) * (1 + 1e-9) >= share * gathered


# ---------------------------------------------------------------------------------------------------------------- times


def test_a_groups_times_by_hand() -> None:
    """Ranks of 100 GB/s and 1 TFLOPS with half of 4 layers of 1e9 bytes; 10e9 bytes/s and 0.01 ms between them."""
    group = group_of(load())
    exchanged = 17 * 0.00001 + 2048 * (1 + 4 * (1024 + 4096 + 2 * 1024) / 1024 / 2) / 10e9
    assert group.seconds(1) == pytest.approx(0.001 + 0.020 + exchanged)
    rows = 17 * 0.00001 + 32 * (exchanged - 17 * 0.00001)
    assert group.seconds(32) == pytest.approx(0.001 + 32 * 0.002 + rows)
    assert group.seconds(0) == 0.0
    twice = group_of(load(time_scale=2.0))
    assert twice.seconds(32) == pytest.approx(2 * group.seconds(32))


def test_the_slowest_rank_and_the_slowest_link_count() -> None:
    slow = {**EMULATED["devices"][1], "compute_tflops": 0.5}
    devices = [EMULATED["devices"][0], slow, *EMULATED["devices"][2:]]
    assert group_of(load(devices=devices)).seconds(32) > group_of(load()).seconds(32) + 0.06
    three = [{"devices": ["a1", "a2", "b1"], "split": "tensors"}]
    exchange = group_of(load(stages=three)).exchange
    assert (exchange.latency_s, exchange.bytes_per_s) == (pytest.approx((1 + 4 * 6 + 2) * 0.0001), 1e9)


def test_messages_of_a_group_are_its_leaders() -> None:
    cluster = load(links={**EMULATED["links"], "between": [{"ends": ["a2", "b1"], **SLOW}]})
    _, between, _ = link_timings(cluster)
    assert between.seconds(1) == pytest.approx(0.0001 + 2048 / 1e9), "from a1, not from a2"
    last = load(stages=[{"devices": ["b1"]}, {"devices": ["a1", "a2"], "split": "tensors"}])
    assert link_timings(last)[-1].seconds(0) == pytest.approx(0.0001), "a1 to d"
    assert len(feature_links(last)) == 2
    assert with_drafter_on(last, "last-stage").drafter == "a1"
    assert isinstance(stage_timings(last)[-1].devices[0], GroupTiming)


SLOW = {"bandwidth_gbit_s": 0.001, "latency_ms": 1000}


def test_a_group_of_one_is_a_device() -> None:
    alone = [{"devices": ["a1"], "layers": 4}, {"devices": ["b1"], "layers": 2}]
    joined = [{**alone[0], "split": "tensors"}, alone[1]]
    assert stage_timings(load(stages=joined)) == stage_timings(load(stages=alone))
    assert link_timings(load(stages=joined)) == link_timings(load(stages=alone))


@given(st.floats(0.01, 1e4), st.floats(0, 10), st.floats(1, 100), st.integers(0, 600))
def test_a_slower_link_never_makes_a_group_faster(gbit_s: float, latency: float, factor: float, rows: int) -> None:
    def seconds(rate: float, late: float) -> float:
        link = {"bandwidth_gbit_s": rate, "latency_ms": late}
        return group_of(load(links={"local": link, "network": SLOW})).seconds(rows)

    first = seconds(gbit_s, latency)
    assert seconds(gbit_s / factor, latency) >= first
    assert seconds(gbit_s, latency * factor) >= first


@given(st.integers(1, 3), st.integers(0, 64))
def test_a_groups_times_cross_the_wire(stage: int, rows: int) -> None:
    (timing, *_) = stage_timings(load(time_scale=float(stage)))
    found = msgspec.msgpack.decode(msgspec.msgpack.encode(timing), type=StageTiming)
    assert found == timing
    assert found.seconds(rows) == timing.seconds(rows)


# --------------------------------------------------------------------------------------------------------------- layers


def test_without_layers_a_group_gets_more_than_a_device() -> None:
    unstated = [{"devices": ["a1", "a2"], "split": "tensors"}, {"devices": ["b1"]}]
    assert [stage.layers for stage in load(stages=unstated).stages] == [(4,), (2,)]


def test_ranks_hold_their_shares() -> None:
    """Four layers of 1e9 bytes and the embedding's 0.5e9: the leader has 2.5e9, the other 2e9."""
    cluster, model = load(), load().as_model
    assert model is not None
    devices = [cluster.device("a1"), cluster.device("a2")]
    held = held_by_part(model, devices, range(4), 100, embedding=True, head=False)
    assert [one.weights for one in held] == [2.5e9, 2e9]
    assert [one.cache for one in held] == [100 * 2 * 4 * 1024 * 2 / 2] * 2


def test_copies_of_a_group_are_groups() -> None:
    alike = uniform_cluster(load(), 3)
    assert [stage.split for stage in alike.stages] == ["tensors"] * 3
    assert stage_timings(alike)[0] == stage_timings(load())[0]
    assert alike.link("a1-2", "a2-2") is not None


def test_a_plan_begins_with_single_devices(tmp_path: Path) -> None:
    file = tmp_path / "joined.toml"
    file.write_text(tomli_w.dumps(JOINED))
    assert load_cluster(str(file)).stages[0].tensor_parallel
    assert not any(stage.tensor_parallel for stage in load_devices(str(file)).stages)


# --------------------------------------------------------------------------------------------------------------- errors


def priced(**changes: Any) -> dict[str, Any]:
    return {"as_model": {name: value for name, value in {**MODEL, **changes}.items() if value is not None}}


def ranks(*devices: str, **changes: Any) -> dict[str, Any]:
    return {"stages": [{"devices": list(devices), "split": "tensors", **changes}]}


@pytest.mark.parametrize(
    ("changes", "path", "words"),
    [
        (ranks("a1", "a2", split="tensor"), "stages[0].split", "did you mean 'tensors'"),
        (ranks("a1", "a2", layers=[3, 3]), "stages[0].layers", "one number: each of its ranks has a share"),
        (ranks("a1", "a2", layers=0), "stages[0].layers", "at least 1"),
        (ranks("a1", "c"), "stages[0].devices[1]", "which is no device"),
        (priced(key_value_heads=None), "as_model.key_value_heads", 'state it, or split the stage by "layers"'),
        (priced(intermediate_size=None), "as_model.intermediate_size", "is missing, and stages[0].devices are"),
        (priced(key_value_heads=3), "as_model.attention_size", "a multiple of key_value_heads, 3"),
        (priced(key_value_heads=8, key_value_size=100), "as_model.key_value_size", "a multiple of key_value_heads"),
        (priced(key_value_heads=0), "as_model.key_value_heads", "above 0"),
        (priced(intermediate_size=0), "as_model.intermediate_size", "above 0"),
        (priced(gathered_bytes=0), "as_model.gathered_bytes", "above 0"),
        (priced(layer_parameters=4_000_000), "as_model.layer_parameters", "of these sizes have 8388608"),
        (priced(key_value_heads=1), "stages[0].devices", "2 tensor parallel ranks for the 1 KV groups of a layer"),
        (
            priced(intermediate_size=16),
            "stages[0].devices",
            "1 blocks of 16 outputs of intermediate_size; name at most",
        ),
        (priced(head_parameters=1024), "stages[0].devices", "1 blocks of 16 outputs of the head"),
        ({"links": {"network": SLOW}}, "links.local", "'a1' and 'a2' have to be joined"),
        ({"kinds": {"gpu": {"pass_ms": 8, "compute_tflops": 1}}}, "devices[0].pass_ms", "holds for whole layers"),
        ({"kinds": {"gpu": {"compute_tflops": 1}}}, "devices[0]", "needs weight_bandwidth_gb_s"),
        ({"kinds": {"gpu": {**KIND, "memory_gb": 1}}}, "stages[0].devices[0]", "for its share of 4 layers"),
    ],
)
def test_what_a_file_cannot_say(changes: dict[str, Any], path: str, words: str) -> None:
    with pytest.raises(FieldError) as error:
        load(**changes)
    assert error.value.field == path
    assert words in error.value.problem


def test_real_devices_share_a_stage_as_ranks_alone() -> None:
    real = {"name": "real", "devices": [{"name": "a"}, {"name": "b", "host": "far"}]}
    cluster = resolve(parse(ClusterFile, {**real, **ranks("a", "b")}))
    assert hosts_of_ranks(None, cluster, 1) == (("", "far"),)
    with pytest.raises(FieldError, match="names 2 devices, and a real stage runs on one") as error:
        resolve(parse(ClusterFile, {**real, "stages": [{"devices": ["a", "b"]}]}))
    assert error.value.field == "stages[0].devices"


def test_every_model_of_a_preset_can_be_divided_by_two() -> None:
    for name in ("demo", "pipedec-7", "flowspec-13b", "two-servers"):
        model = load_cluster(name).as_model
        assert model is not None
        check_divisible(model, 2, "devices")
