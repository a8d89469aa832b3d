"""Cluster files: presets and local-N load, defaults are filled in, and every mistake is refused by its field."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cluster import PRICES, load_cluster, preset_names
from penstock.cluster.load import ClusterFile, resolve, spread, with_drafter_on, with_network_bandwidth
from penstock.cluster.spec import Cluster
from penstock.config import FieldError, parse
from penstock.core import ConfigError
from tests.unit.cluster.sample import EMULATED

REAL: dict[str, Any] = {"name": "real", "devices": [{"name": "a"}, {"name": "b"}], "stages": [{"devices": ["a"]}]}
PLAIN = {key: value for key, value in EMULATED.items() if key not in ("drafter", "draft_as_model")}
MEASURED = {**EMULATED, "kinds": {"gpu": {"pass_ms": 8, "compute_tflops": 1}}}


def edited(base: dict[str, Any], *edits: tuple[list[str | int], Any]) -> dict[str, Any]:
    """A deep copy of ``base`` with the value at each path replaced."""
    table = copy.deepcopy(base)
    for (*path, last), value in edits:
        inner: Any = table
        for key in path:
            inner = inner[key]
        inner[last] = value
    return table


def load(table: dict[str, Any]) -> Cluster:
    return resolve(parse(ClusterFile, table))


@pytest.mark.parametrize("name", preset_names())
def test_presets_load_under_their_own_name(name: str) -> None:
    cluster = load_cluster(name)
    assert cluster.name == name
    assert cluster.emulated
    assert cluster.description
    assert cluster.as_model is not None
    assert sum(sum(stage.layers) for stage in cluster.stages) == cluster.as_model.layers


STAGES = {
    "demo": 4,
    "flowspec-13b": 4,
    "flowspec-7b": 4,
    "jupiter-heterogeneous": 4,
    "jupiter-homogeneous": 4,
    "pipedec-14x3090": 14,
    "pipedec-21": 21,
    "pipedec-7": 7,
    "spd-16": 16,
    "spd-4": 4,
    "spd-8": 8,
    "two-servers": 8,
}


def test_the_presets_of_this_release_are_there() -> None:
    assert {name: len(load_cluster(name).stages) for name in preset_names()} == STAGES
    assert all(len(stage.devices) == 2 for stage in load_cluster("pipedec-7").stages)


def test_local_is_not_emulated() -> None:
    cluster = load_cluster("local-3")
    assert (len(cluster.stages), cluster.emulated, cluster.engine, cluster.drafter) == (3, False, "stage-1", None)
    assert {device.host for device in cluster.devices} == {"localhost"}


def test_defaults_are_filled_in() -> None:
    cluster = load(EMULATED)
    assert [stage.layers for stage in cluster.stages] == [(2,), (2, 2)]
    assert cluster.engine == "d"
    assert cluster.draft_as_model is PRICES["llama-160m-fp16"]
    assert cluster.device("a2").weight_bandwidth_gb_s == 100
    assert load(REAL).engine == "a"


def test_a_device_overrides_its_kind() -> None:
    device = load(edited(EMULATED, (["devices", 1, "overhead_ms"], 0))).device("a2")
    assert (device.overhead_ms, device.compute_tflops) == (0, 1)


def test_links_by_device_then_host_then_default() -> None:
    between = [
        {"ends": ["a", "b"], "bandwidth_gbit_s": 1, "latency_ms": 1},
        {"ends": ["b1", "a"], "bandwidth_gbit_s": 2, "latency_ms": 1},
    ]
    cluster = load(edited(EMULATED, (["links", "between"], between)))
    found = {
        ends: link and link.bandwidth_gbit_s
        for ends in ("a1 a2", "a1 b1", "d a1", "d d")
        for link in [cluster.link(*ends.split())]
    }
    assert found == {"a1 a2": 80, "a1 b1": 2, "d a1": 1, "d d": None}


def test_route_goes_from_the_engine_through_the_stages_and_back() -> None:
    assert load(EMULATED).route() == [("d", "a1"), ("a1", "a2"), ("b1", "d")]


def test_file_and_overrides(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('name = "mine"\ndevices = [{ name = "a" }]\nstages = [{ devices = ["a"] }]\n')
    assert load_cluster(str(path)).name == "mine"
    slow = load_cluster("demo", time_scale=3, links={"network": {"bandwidth_gbit_s": 0.1}})
    assert slow.time_scale == 3
    assert slow.links.network is not None
    assert (slow.links.network.bandwidth_gbit_s, slow.links.network.latency_ms) == (0.1, 0.2)


def rate(cluster: Cluster, pair: str) -> float | None:
    link = cluster.link(*pair.split())
    return link and link.bandwidth_gbit_s


def test_another_bandwidth_between_hosts_leaves_the_rest_as_it_is() -> None:
    between = [
        {"ends": ["a1", "b"], "bandwidth_gbit_s": 2, "latency_ms": 3},
        {"ends": ["a2", "a1"], "bandwidth_gbit_s": 5, "latency_ms": 1},
        {"ends": ["a", "a"], "bandwidth_gbit_s": 6, "latency_ms": 1},
    ]
    before = load(edited(EMULATED, (["links", "between"], between)))
    after = with_network_bandwidth(before, 0.5)
    pairs = ["a1 b1", "a2 b1", "a1 a2", "b1 d"]
    assert [rate(before, pair) for pair in pairs] == [2, 8, 5, 80]
    assert [rate(after, pair) for pair in pairs] == [0.5, 0.5, 5, 80]
    link = after.link("a1", "b1")
    assert link is not None
    assert link.latency_ms == 3
    assert dataclasses.replace(after, links=before.links) == before


def test_a_preset_with_another_bandwidth() -> None:
    cluster = load_cluster("jupiter-homogeneous", bandwidth_gbit_s=0.94, time_scale=2)
    assert (rate(cluster, "nx-1 nx-2"), rate(cluster, "nx-4 heads"), cluster.time_scale) == (0.94, 240, 2)


@pytest.mark.parametrize(
    ("name", "gbit_s", "words"),
    [
        ("demo", 0, "cluster demo: bandwidth_gbit_s is 0; it has to be above 0"),
        ("demo", math.inf, "bandwidth_gbit_s is inf; it has to be above 0"),
        ("local-2", 1, "cluster local-2: bandwidth_gbit_s is 1; it has to be left out: no as_model"),
        ("spd-4", 1, "cluster spd-4: bandwidth_gbit_s is 1; it has to be left out: all devices are on one host"),
    ],
)
def test_a_bandwidth_that_changes_nothing_is_refused(name: str, gbit_s: float, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_cluster(name, bandwidth_gbit_s=gbit_s)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("dmeo", r"'dmeo' is unknown; did you mean 'demo'\? Known: demo, .*random-SEED, local-N, or a path that ends"),
        ("local-0", "'local-0' is unknown"),
        ("local-", r"did you mean 'local-N'"),
        ("random-7:1", "cluster random-7:1: stages is 1; it has to be between 2 and 128"),
        ("random-7:129", "stages is 129; it has to be between 2 and 128"),
        ("random-", r"did you mean 'random-SEED'"),
        ("random-07", "'random-07' is unknown"),
        ("nowhere.toml", r"nowhere\.toml: cannot be read"),
    ],
)
def test_unknown_names_are_refused(name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_cluster(name)


def test_errors_name_source_and_field(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('name = "mine"\ndevices = [{ name = "a" }]\nstages = [{ device = ["a"] }]\n')
    with pytest.raises(ConfigError, match=r"mine\.toml: stages\[0\]\.device is unknown; did you mean 'devices'"):
        load_cluster(str(path))
    with pytest.raises(ConfigError, match=r"cluster demo: time_scales is unknown; did you mean 'time_scale'"):
        load_cluster("demo", time_scales=2)


def test_the_drafter_may_share_a_stages_device() -> None:
    cluster = load(edited(EMULATED, (["drafter"], "b1")))
    assert (cluster.drafter, cluster.engine, cluster.drafting_stage) == ("b1", "b1", 1)
    assert load(EMULATED).drafting_stage is None
    assert load(edited(EMULATED, (["drafter"], "a1"), (["engine"], "d"))).drafting_stage == 0


@pytest.mark.parametrize(
    ("place", "device", "stage"), [("engine", "d", None), ("last-stage", "b1", 1), ("a1", "a1", 0), ("a2", "a2", 1)]
)
def test_the_drafter_moves_and_the_engine_stays(place: str, device: str, stage: int | None) -> None:
    before = load(EMULATED)
    after = with_drafter_on(before, place)
    assert (after.drafter, after.engine, after.drafting_stage) == (device, "d", stage)
    assert dataclasses.replace(after, drafter="d") == before


def test_a_measured_pass_goes_with_the_drafter() -> None:
    moved = load_cluster("spd-4", drafter_on="last-stage")
    assert (moved.drafter, moved.draft_pass_ms) == ("gpu-4", 4.15)


def test_a_real_drafter_moves_to_any_device() -> None:
    places = {"engine": None, "first-stage": "stage-1", "last-stage": "stage-3", "stage-2": "stage-2"}
    for place, device in places.items():
        assert load_cluster("local-3", drafter_on=place).drafter == device


def test_a_real_engine_runs_where_it_is_started(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    hosts = {"here": "localhost", "there": "10.0.0.2:7700"}
    devices = "".join(f'[[devices]]\nname = "{name}"\nhost = "{host}"\n' for name, host in hosts.items())
    for engine, refused in (("here", False), ("there", True)):
        file.write_text(f'name = "c"\nengine = "{engine}"\n{devices}[[stages]]\ndevices = ["there"]\n')
        if refused:
            with pytest.raises(ConfigError, match=r"engine is 'there', on host 10\.0\.0\.2:7700"):
                load_cluster(str(file))
        else:
            assert load_cluster(str(file)).engine == "here"


@pytest.mark.parametrize(
    ("name", "place", "words"),
    [
        ("demo", "board4", "cluster demo: drafter_on is 'board4', which is no device; did you mean 'board-4'"),
        (
            "local-2",
            "stage-9",
            "cluster local-2: drafter_on is 'stage-9', which is no device; Known: engine, first-stage",
        ),
    ],
)
def test_a_place_where_no_drafter_can_be_is_refused(name: str, place: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_cluster(name, drafter_on=place)


def test_a_drafter_is_not_moved_to_where_it_does_not_fit_nor_where_there_is_none() -> None:
    tight = load(edited(EMULATED, (["devices", 0, "memory_gb"], 2.6)))
    with pytest.raises(FieldError, match=r"drafter \('a1'\) would need 3.02 GB for 2 layers and the draft model"):
        with_drafter_on(tight, "a1")
    with pytest.raises(FieldError, match="the cluster names no drafter that could be moved"):
        with_drafter_on(load(PLAIN), "engine")


def test_without_layers_devices_get_them_by_speed_and_memory() -> None:
    twice = load(edited(EMULATED, (["devices", 0, "weight_bandwidth_gb_s"], 200)))
    assert [stage.layers for stage in twice.stages] == [(4,), (1, 1)], "21 ms at most; the last one has the head"
    small = load(edited(EMULATED, (["devices", 0, "memory_gb"], 1.6)))
    assert [stage.layers for stage in small.stages] == [(1,), (3, 2)], "an embedding and a layer are 1.5 GB"


LINK = {"bandwidth_gbit_s": 1, "latency_ms": 1}
STATED: dict[str, Any] = {
    **EMULATED,
    "stages": [{"devices": ["a1"], "layers": 2}, {"devices": ["a2", "b1"], "layers": [2, 2]}],
}


@pytest.mark.parametrize(
    ("base", "edits", "path", "words"),
    [
        # shape and numbers
        (EMULATED, [(["kv_slots"], 0)], "kv_slots", "above 0"),
        (EMULATED, [(["as_model", "key_value_size"], -1)], "as_model.key_value_size", "0 or above"),
        (EMULATED, [(["time_scale"], 0)], "time_scale", "above 0"),
        (EMULATED, [(["stages"], [])], "stages", "at least one stage; `penstock plan -o plan.toml` chooses them"),
        (EMULATED, [(["stages", 1, "devices"], [])], "stages[1].devices", "at least one device"),
        (EMULATED, [(["stages", 1, "devices"], "a2")], "stages[1].devices", "expected a list"),
        (EMULATED, [(["kinds", "gpu", "memory_gb"], -1)], "kinds.gpu.memory_gb", "above 0"),
        (EMULATED, [(["kinds", "gpu", "overhead_ms"], -1)], "kinds.gpu.overhead_ms", "0 or above"),
        (REAL, [(["devices", 0, "threads"], 0)], "devices[0].threads", "at least 1"),
        (REAL, [(["devices", 0, "threads"], 1025)], "devices[0].threads", "at most 1024"),
        (EMULATED, [(["devices", 0, "threads"], 2)], "devices[0].threads", "left out: the device is emulated"),
        (EMULATED, [(["devices", 0, "compute_tflops"], 0)], "devices[0].compute_tflops", "above 0"),
        (EMULATED, [(["links", "local", "bandwidth_gbit_s"], 0)], "links.local.bandwidth_gbit_s", "above 0"),
        (EMULATED, [(["links", "between"], [{"ends": ["a"], **LINK}])], "links.between[0].ends", "two names"),
        (EMULATED, [(["as_model", "layers"], 0)], "as_model.layers", "above 0"),
        (EMULATED, [(["as_model", "layer"], 1)], "as_model.layer", "did you mean 'layers'"),
        (EMULATED, [(["as_model"], "llama-3.1-70b")], "as_model", "did you mean 'llama-3.1-70b-fp32'"),
        (EMULATED, [(["draft_as_model"], "none")], "draft_as_model", "is unknown"),
        # names
        (EMULATED, [(["devices", 1, "name"], "a1")], "devices[1].name", "earlier device"),
        (EMULATED, [(["devices", 1, "name"], "b")], "devices[1].name", "another device's host"),
        (EMULATED, [(["devices", 1, "kind"], "gqu")], "devices[1].kind", "did you mean 'gpu'"),
        (EMULATED, [(["stages", 1, "devices", 1], "b2")], "stages[1].devices[1]", "which is no device"),
        (EMULATED, [(["stages", 1, "devices", 1], "a1")], "stages[1].devices[1]", "stages[0].devices[0] uses already"),
        (EMULATED, [(["engine"], "e")], "engine", "which is no device"),
        (EMULATED, [(["links", "between"], [{"ends": ["a", "c"], **LINK}])], "links.between[0].ends[1]", "names 'c'"),
        (
            EMULATED,
            [(["links", "between"], [{"ends": ["a", "b"], **LINK}, {"ends": ["b", "a"], **LINK}])],
            "links.between[1].ends",
            "earlier link",
        ),
        # layers
        (EMULATED, [(["stages", 0, "layers"], 2)], "stages[1].layers", "every stage or of none"),
        (
            EMULATED,
            [(["stages", 0, "layers"], 2), (["stages", 1, "layers"], 5)],
            "stages",
            "hold 7 layers together; as_model has 6",
        ),
        (EMULATED, [(["stages", 0, "layers"], 5), (["stages", 1, "layers"], 1)], "stages[1].layers", "at least 1 for"),
        (EMULATED, [(["stages", 0, "layers"], 5), (["stages", 1, "layers"], [1])], "stages[1].layers", "one for each"),
        (EMULATED, [(["stages", 0, "layers"], 6), (["stages", 1, "layers"], [0, 0])], "stages[1].layers", "everywhere"),
        (EMULATED, [(["as_model", "layers"], 2)], "stages", "3 devices for the 2 layers"),
        # emulation
        (EMULATED, [(["kinds", "gpu"], {"memory_gb": 10})], "devices[0]", "needs weight_bandwidth_gb_s"),
        (EMULATED, [(["kinds", "gpu"], {"pass_ms": 8})], "devices[0]", "or compute_tflops and pass_ms"),
        (EMULATED, [(["kinds", "gpu", "pass_ms"], 0)], "kinds.gpu.pass_ms", "above 0"),
        (EMULATED, [(["devices", 2, "pass_ms"], 8)], "devices[2].pass_ms", "holds what weight_bandwidth_gb_s is for"),
        (REAL, [(["devices", 0, "pass_ms"], 8)], "as_model", "devices[0] ('a') has pass_ms"),
        (REAL, [(["stages", 0, "devices"], ["a", "b"])], "stages[0].devices", "give each device a stage of its own"),
        (EMULATED, [(["draft_as_model"], None)], "draft_as_model", "it prices the drafter"),
        (EMULATED, [(["drafter"], None)], "drafter", "draft_as_model prices the device"),
        (EMULATED, [(["links"], {"network": LINK})], "links.local", "'a1' and 'a2' have to be joined"),
        (EMULATED, [(["links"], {"local": LINK})], "links.network", "'d' and 'a1' have to be joined"),
        (
            STATED,
            [(["devices", 1, "memory_gb"], 1)],
            "stages[1].devices[0]",
            "weights 2.00, 4096 tokens of KV 0.03, activations 0.02); it has 1 GB",
        ),
        (STATED, [(["devices", 0, "memory_gb"], 2.4)], "stages[0].devices[0]", "weights 2.50"),  # with the embedding
        (STATED, [(["devices", 2, "memory_gb"], 2.4)], "stages[1].devices[1]", "weights 2.50"),  # with the head
        (EMULATED, [(["devices", 3, "memory_gb"], 0.3)], "drafter", "0.49 GB for the draft model (weights 0.32"),
        (
            EMULATED,
            [(["drafter"], "b1"), (["devices", 2, "memory_gb"], 2.7)],
            "drafter",
            "('b1') would need 3.02 GB for 2 layers and the draft model (weights 2.82",
        ),
        (EMULATED, [(["draft_pass_ms"], 0)], "draft_pass_ms", "above 0"),
        (PLAIN, [(["draft_pass_ms"], 4)], "draft_pass_ms", "there is no drafter"),
        (MEASURED, [(["drafter"], "b1")], "draft_pass_ms", "'b1' has pass_ms, which is stages[1]'s"),
        (REAL, [(["draft_pass_ms"], 4)], "as_model", "draft_pass_ms is set"),
        # nothing emulated
        (EMULATED, [(["as_model"], None)], "as_model", "has weight_bandwidth_gb_s"),
        (REAL, [(["draft_as_model"], "llama-160m-fp16")], "as_model", "draft_as_model is set"),
        (REAL, [(["time_scale"], 2)], "time_scale", "nothing is emulated"),
        (REAL, [(["stages", 0, "layers"], 4)], "stages[0].layers", "layer_split"),
    ],
)
def test_mistakes_are_refused_by_field(
    base: dict[str, Any], edits: list[tuple[list[str | int], Any]], path: str, words: str
) -> None:
    with pytest.raises(FieldError) as caught:
        load(edited(base, *edits))
    assert caught.value.field == path
    assert words in caught.value.problem


@given(st.integers(1, 200), st.integers(1, 64))
def test_an_even_split_is_even_and_whole(layers: int, devices: int) -> None:
    counts = spread(layers, devices)
    assert (sum(counts), len(counts)) == (layers, devices)
    assert counts[0] - counts[-1] <= 1
    assert list(counts) == sorted(counts, reverse=True)


def test_a_cluster_file_survives_json() -> None:
    assert load(json.loads(json.dumps(EMULATED))) == load(EMULATED)
