"""``layer_split="auto"``: which hosts get which layers, from stored profiles, and what is said of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from penstock.cluster.spec import LayerTimes, Link
from penstock.config import FieldError
from penstock.core import ConfigError
from penstock.engine import opening as places
from penstock.engine import resolve as resolving
from penstock.engine.build import stage_plans
from penstock.engine.opening import planned
from penstock.engine.options import EngineOptions
from penstock.engine.profile import measure
from penstock.engine.profile.hosts import HostsProfile, cluster_of_hosts, link_key, slow_groups, with_prefill_times
from penstock.engine.profile.measure import Candidates, candidates_on
from penstock.engine.profile.store import DeviceProfile, LinkProfile, ProfileStore, profiles_folder
from penstock.engine.resolve import resolve_options
from penstock.hosts.facts import DeviceFacts, HostFacts, own_versions
from penstock.hosts.fleet import FleetExecutor
from penstock.planner.costs import PieceTable
from tests.checkpoints import make_checkpoint
from tests.gguf_files import make_gguf

NAMES = ("a:1", "b:1", "c:1")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def facts(name: str, *gpus: str, free: int = 8_000_000_000) -> HostFacts:
    devices = tuple(DeviceFacts(device=one, model="m", memory=2 * free, free=free) for one in ("cpu", *gpus))
    return HostFacts(name=name, incarnation=name, versions=own_versions(), cores=2, devices=devices)


def host(*found: HostFacts) -> FleetExecutor:
    """A host of a fleet that states these facts, and nothing else."""
    made = object.__new__(FleetExecutor)
    made.fleet = SimpleNamespace(living={one.name: one for one in found}, security=None)  # type: ignore[assignment]
    return made


THREE = host(*map(facts, NAMES))


def options(**given: Any) -> EngineOptions:
    return EngineOptions(**{"model": "demo", "hosts": ",".join(NAMES), "speculative_config": None, **given})


def times(layer_ms: float) -> LayerTimes:
    return LayerTimes(
        rows=(1, 64), contexts=(0,), layer_ms=((layer_ms,), (8 * layer_ms,)), stage_ms=(0.1, 0.1), head_ms=(0.5, 1.0)
    )


def keep(fleet: FleetExecutor, speeds: dict[str, float], latency_ms: float = 0.1) -> None:
    """Store profiles of these hosts, by the time of a layer, and of all links."""
    names = list(speeds)
    keep_times(candidates_on(options(), names, fleet.fleet.living), speeds, names, latency_ms)


def keep_times(found: Candidates, speeds: dict[str, float], names: list[str], latency_ms: float) -> None:
    """Store the time of a layer on each device, and links between all hosts."""
    store = ProfileStore(profiles_folder())
    for name, layer_ms in speeds.items():
        store.keep(DeviceProfile(key=found.devices[name].key, times=times(layer_ms)))
    for i, one in enumerate(["localhost", *names]):
        for other in names[i:]:
            link = Link(bandwidth_gbit_s=1.0, latency_ms=latency_ms)
            store.keep(LinkProfile(key=link_key(one, other, encrypted=False), link=link))


def test_equal_hosts_are_planned_for_where_layers_differ(tmp_path: Path) -> None:
    """Layers 2 and 4 attend, the others carry a state; the even split is 2, 2, 1."""
    model = str(make_checkpoint(tmp_path / "hybrid", "qwen3_5"))
    found = candidates_on(options(model=model), list(NAMES), THREE.fleet.living)
    assert found.price.layer_kinds == (0, 0, 1, 0, 1)
    keep_times(found, dict.fromkeys(NAMES, 5.0), list(NAMES), 0.01)
    given = options(model=model, speculative_config={})
    assert planned(given, THREE) == given, "as far as is known, all layers take the same"
    store, (slow, quick) = ProfileStore(profiles_folder()), (times(ms).layer_ms for ms in (8.0, 1.0))
    for one in found.devices.values():
        store.keep(DeviceProfile(key=one.key, times=replace(times(5.0), kind_ms=(slow, quick))))
    assert planned(given, THREE).layer_split == "1,2,2"


def split_of(found: EngineOptions) -> dict[str, int]:
    assert found.layer_split is not None
    return dict(zip(found.hosts.split(","), map(int, found.layer_split.split(",")), strict=False))  # type: ignore[union-attr]


def test_unequal_hosts_get_layers_by_their_speed_where_drafts_keep_them_busy(caplog: pytest.LogCaptureFixture) -> None:
    keep(THREE, {"a:1": 1.0, "b:1": 1.5, "c:1": 3.0}, latency_ms=0.01)
    found = planned(options(speculative_config={}), THREE)
    split = split_of(found)
    assert sum(split.values()) == 16
    assert split["a:1"] > split.get("b:1", 0) >= split.get("c:1", 0)
    assert found.pipeline_parallel_size == len(split)
    (line,) = caplog.messages
    assert line.startswith(f"layers are split {found.layer_split} over ")
    assert "in the slowest stage" in line


def test_plain_decoding_takes_the_fastest_alone_and_keeps_the_others_as_spares(
    caplog: pytest.LogCaptureFixture,
) -> None:
    keep(THREE, {"a:1": 2.0, "b:1": 1.0, "c:1": 3.0})
    found = planned(options(), THREE)
    assert (found.hosts, found.layer_split, found.pipeline_parallel_size) == ("b:1,a:1,c:1", "16", 1)
    assert "a:1, c:1 kept as spares" in caplog.messages[0]


def test_hosts_that_are_alike_or_unknown_share_evenly(caplog: pytest.LogCaptureFixture) -> None:
    assert planned(options(), THREE) == options()
    assert caplog.messages == ["layers are split evenly: `penstock profile` has not measured a:1, b:1, c:1"]
    keep(THREE, {"a:1": 1.0, "b:1": 1.05, "c:1": 1.0})
    assert planned(options(), THREE) == options()
    assert len(caplog.messages) == 1


@pytest.mark.parametrize("given", [{"layer_split": "6,5,5"}, {"pipeline_parallel_size": 6}, {"hosts": "a:1"}])
def test_what_is_written_down_stays(given: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    keep(THREE, {"a:1": 1.0, "b:1": 1.5, "c:1": 3.0})
    assert planned(options(**given), THREE) == options(**given)
    assert not caplog.messages


def test_auto_plans_alike_hosts_too_and_measures_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    keep(THREE, {"a:1": 1.0, "b:1": 1.0, "c:1": 1.0})
    assert planned(options(layer_split="auto"), THREE).layer_split == "16"
    monkeypatch.setenv("XDG_CACHE_HOME", "/nowhere")
    caplog.clear()

    def complete(profile: Any, host: Any, reporting: Any) -> Any:
        assert profile.missing == "a:1, b:1, c:1"
        for name in NAMES:
            reporting(name)(1, 2)
        return replace(profile, times={name: times(1.0) for name in NAMES}, links=[])

    monkeypatch.setattr(places, "completed", complete)
    monkeypatch.setattr(places, "decided", lambda options, profile: options)
    planned(options(layer_split="auto"), THREE)
    assert caplog.messages == [f"measuring {name}, to split the layers" for name in NAMES]


def test_a_host_with_several_gpus_is_planned_for_by_name_only() -> None:
    fleet = host(facts("a:1", "cuda:0", "cuda:1"), facts("b:1", "cuda:0"))
    two = {"hosts": "a:1,b:1", "device": "cuda"}
    with pytest.raises(FieldError, match=r"a:1 has 2 GPUs: name it as often \(hosts a:1,a:1\)"):
        planned(options(**two, layer_split="auto"), fleet)
    assert planned(options(**two), fleet) == options(**two)


def test_gpus_of_a_host_that_is_named_for_each_are_planned_for_like_hosts(caplog: pytest.LogCaptureFixture) -> None:
    fleet = host(facts("a:1", "cuda:0", "cuda:1"), facts("b:1", "cuda:0"))
    given = options(hosts="a:1,b:1,a:1", device="cuda", speculative_config={})
    found = candidates_on(given, ["a:1", "b:1", "a:1"], fleet.fleet.living)
    assert {label: (one.name, one.device) for label, one in found.devices.items()} == {
        "a:1/cuda:0": ("a:1", "cuda:0"),
        "b:1": ("b:1", "cuda:0"),
        "a:1/cuda:1": ("a:1", "cuda:1"),
    }
    assert planned(given, fleet) == given
    assert caplog.messages == [
        "layers are split evenly: `penstock profile` has not measured a:1/cuda:0, b:1, a:1/cuda:1"
    ]
    caplog.clear()
    keep_times(found, {"a:1/cuda:0": 1.0, "b:1": 4.0, "a:1/cuda:1": 1.0}, ["a:1", "b:1"], latency_ms=0.01)
    plan = planned(given, fleet)
    assert plan.hosts is not None
    assert plan.layer_split is not None
    assert plan.hosts.split(",")[: plan.pipeline_parallel_size].count("a:1") == 2
    assert sorted(plan.hosts.split(",")) == ["a:1", "a:1", "b:1"]
    setup = resolve_options(plan, fleet.fleet.living)
    placed = dict(zip(zip(setup.hosts, setup.devices, strict=False), map(layers_of, setup.layers), strict=True))
    slower = placed.get(("b:1", "cuda:0"), 0)
    assert min(placed["a:1", "cuda:0"], placed["a:1", "cuda:1"]) > slower
    timed = with_prefill_times(setup, fleet.fleet.living, encrypted=False)
    assert timed.prefill_times is not None, "each GPU's own times are found under its name"


def layers_of(stage: tuple[int, int]) -> int:
    return stage[1] - stage[0]


def test_the_engines_own_gpus_are_candidates_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine is beside the first of them, and they are linked within the host."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    own = facts("localhost", "cuda:0", "cuda:1")
    for module in (measure, resolving):
        monkeypatch.setattr(module, "own_facts", lambda name: own)
    names = ["localhost", "localhost"]
    found = candidates_on(options(hosts=",".join(names), device="cuda"), names, {})
    labels = ["localhost/cuda:0", "localhost/cuda:1"]
    assert found.names == labels
    cluster = cluster_of_hosts(HostsProfile(found, dict.fromkeys(labels, times(1.0)), []), drafts=True)
    assert (cluster.engine, cluster.drafter) == (labels[0], labels[0])
    assert [device.name for device in cluster.devices] == labels
    link = cluster.link(*labels)
    assert link is not None
    assert (link.bandwidth_gbit_s, link.latency_ms) == pytest.approx((8.0, 0.1))


def test_gpus_of_a_host_that_differ_are_not_planned_for() -> None:
    one, other = facts("a:1", "cuda:0", "cuda:1"), DeviceFacts(device="cuda:1", model="another")
    fleet = host(msgspec.structs.replace(one, devices=(*one.devices[:2], other)))
    with pytest.raises(FieldError, match="GPUs of a host that are alike, and a:1 has another and m: run a worker for"):
        planned(options(hosts="a:1,a:1", device="cuda", layer_split="auto"), fleet)


def test_a_stage_fits_on_whichever_gpu_of_a_host_it_gets() -> None:
    full = DeviceFacts(device="cuda:1", model="m", memory=16, free=7)
    roomy = facts("a:1", "cuda:0")
    fleet = host(msgspec.structs.replace(roomy, devices=(*roomy.devices, full)))
    names = ["a:1", "a:1"]
    found = candidates_on(options(hosts="a:1,a:1", device="cuda"), names, fleet.fleet.living)
    assert [one.free for one in found.devices.values()] == [7, 7]
    unknown = host(msgspec.structs.replace(roomy, devices=(*roomy.devices, msgspec.structs.replace(full, free=None))))
    found = candidates_on(options(hosts="a:1,a:1", device="cuda"), names, unknown.fleet.living)
    assert [one.free for one in found.devices.values()] == [None, None]


def test_where_the_model_fits_in_no_way_it_is_said() -> None:
    tiny = host(*(facts(name, free=1000) for name in NAMES))
    keep(tiny, {"a:1": 1.0, "b:1": 2.0, "c:1": 1.0})
    with pytest.raises(ConfigError, match=r"no plan fits: the model needs .* GB .* a layer .* have, in GB: a:1 0, b:1"):
        planned(options(), tiny)


def test_a_drafter_with_weights_needs_room_beside_the_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """71.3 MB of model fit on this host, the fastest by far, and 5.1 of a drafter do not fit beside them."""
    monkeypatch.setattr(measure, "own_facts", lambda name: facts("localhost", free=72_000_000))
    two = {"hosts": "localhost,b:1", "layer_split": "auto"}
    fleet = host(facts("b:1"))
    keep(fleet, {"localhost": 1.0, "b:1": 9.0})
    assert split_of(planned(options(**two), fleet)) == {"localhost": 16}
    drafted = planned(options(**two, speculative_config={"method": "draft_model"}), fleet)
    assert 0 < split_of(drafted)["localhost"] < 16


def test_a_number_of_stages_beside_auto_is_refused() -> None:
    with pytest.raises(FieldError, match="pipeline_parallel_size is 2; it has to be left out with layer_split auto"):
        options(layer_split="auto", pipeline_parallel_size=2)


def test_auto_beside_a_cluster_is_refused() -> None:
    with pytest.raises(FieldError, match="layer_split is 'auto'; it has to be left out with a cluster"):
        options(layer_split="auto", cluster="demo", hosts=None)


def test_prompts_of_measured_stages_enter_in_planned_pieces(caplog: pytest.LogCaptureFixture) -> None:
    """Three stages that take as long for a row as reading their weights: many short pieces keep them busy."""
    keep(THREE, {"a:1": 1.0, "b:1": 1.5, "c:1": 3.0})
    living = THREE.fleet.living
    asked = options(layer_split="8,5,3", threads=2)
    setup = with_prefill_times(resolve_options(asked, living), living, encrypted=False)
    assert setup.prefill_times is not None
    stages, links = setup.prefill_times
    assert [round(1e3 * stage.seconds(1), 3) for stage in stages] == [8.1, 7.6, 9.1]
    assert [link.row_bytes for link in links] == [24, 4 * 192, 4 * 192, 24]
    ends = PieceTable(stages, links).ends(256)
    assert len(ends) > 2
    for other in (options(layer_split="8,5,3", threads=1), options(layer_split="8,5,3", prefill_chunk=64)):
        assert with_prefill_times(resolve_options(other, living), living, encrypted=False).prefill_times is None


def test_ranks_that_wait_longer_than_they_save_are_told_of_with_the_figures() -> None:
    """On stored links of 0.1 ms a row waits 6.4 ms in 16 layers. These take 16 ms alone, where that pays, or 8."""
    fleet, two = host(facts("a:1"), facts("b:1")), {"hosts": "a:1,b:1", "tensor_parallel_size": 2}
    living = fleet.fleet.living
    setup = resolve_options(options(**two, threads=2), living)
    assert list(slow_groups(setup, living, encrypted=False)) == []  # nothing has been measured
    keep(fleet, {"a:1": 1.0, "b:1": 1.0})
    assert list(slow_groups(setup, living, encrypted=False)) == []
    keep(fleet, {"a:1": 0.5, "b:1": 0.5})
    (said,) = slow_groups(setup, living, encrypted=False)
    assert said.startswith("stage 0: its 2 ranks on a:1 + b:1 wait for each other for ")
    assert said.endswith("a:1 alone would take 8.0 ms for its layers; use pipeline_parallel_size there")


def test_a_gpu_is_measured_in_the_formats_that_the_engine_has_there(tmp_path: Path) -> None:
    """Beside whole numbers, dtype auto is float32 on a CPU, and has 16 bits on a GPU."""
    model = str(make_gguf(tmp_path / "four", kind=Kind.Q4_1))
    fleet = host(facts("a:1", "cuda:0"), facts("b:1", "cuda:0"))
    given = options(model=model, hosts="a:1,b:1", device="cuda", dtype="auto")
    found = candidates_on(given, ["a:1", "b:1"], fleet.fleet.living).devices
    engine = resolve_options(given, fleet.fleet.living)
    digest = measure.digest_of(engine.checkpoint.source)
    for stage, name in enumerate(("a:1", "b:1")):
        one = found[name]
        assert one.key == measure.key_of(name, fleet.fleet.living[name], engine, digest, stage)
        assert (one.key.device, one.key.quantization, one.key.dtype) == ("cuda:0", "int4", "bfloat16")
        assert {(plan.dtype, plan.quantization) for plan in stage_plans(one.setup)} == {("bfloat16", "int4")}


def test_a_gpu_that_this_host_lacks_is_not_measured() -> None:
    with pytest.raises(FieldError, match="device is 'cuda', but"):
        candidates_on(options(hosts=None, device="cuda"), ["localhost"], {})
