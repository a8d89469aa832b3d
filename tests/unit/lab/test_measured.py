"""Plans for real hosts, from what ``penstock doctor --json`` prints of them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import msgspec
import pytest

from penstock.cluster import PRICES
from penstock.cluster.spec import Cluster, Device, Links, Stage
from penstock.core import ConfigError
from penstock.engine.options import model_folder
from penstock.hosts.probe import DeviceRates, DoctorReport, ExaminedHost, LinkRates
from penstock.lab.plan import run_with
from penstock.lab.plan_choices import Choice, measured_cluster, price_of
from penstock.planner.partition import Plan
from tests.unit.cli.invoke import invoke


def rates(speed: float, device: str = "cpu") -> DeviceRates:
    return DeviceRates(
        device=device,
        threads=2,
        dtype="float32",
        weight_bandwidth_gb_s=10 * speed,
        compute_tflops=0.1 * speed,
        rows_per_second={1: 100.0 * speed},
    )


def link(source: str, to: str, gbit_s: float, ms: float) -> LinkRates:
    return LinkRates(source=source, to=to, bandwidth_gbit_s=gbit_s, latency_ms=ms)


def report() -> DoctorReport:
    """A report of this host, of one three times as fast with a slow GPU beside it, and of one that did not answer."""
    hosts = [
        ExaminedHost(host="localhost", rates=[rates(1)]),
        ExaminedHost(host="fast", rates=[rates(3), rates(2, "cuda:0")]),
        ExaminedHost(host="gone", problem="nobody listens there"),
    ]
    return DoctorReport(hosts=hosts, links=[link("localhost", "fast", 0.9, 0.2), link("fast", "localhost", 0.5, 0.1)])


def test_a_host_is_its_fastest_device_and_a_link_its_slower_way() -> None:
    cluster = measured_cluster(report(), PRICES["tinyllama-1.1b-fp16"])
    assert [(device.name, device.weight_bandwidth_gb_s) for device in cluster.devices] == [
        ("localhost", 10),
        ("fast", 30),
    ]
    between = cluster.link("localhost", "fast")
    assert between is not None
    assert (between.bandwidth_gbit_s, between.latency_ms) == (0.5, 0.2)
    assert (cluster.engine, cluster.drafter) == ("localhost", "localhost")


def test_devices_of_one_host_are_that_host_to_the_options() -> None:
    devices = [Device(name=f"a/cuda:{i}", host="a") for i in range(2)]
    stages = (Stage(devices=("a/cuda:1",), layers=(3,)), Stage(devices=("a/cuda:0",), layers=(5,)))
    cluster = Cluster(name="c", devices=tuple(devices), links=Links(), stages=stages, engine="a/cuda:0")
    plan = Plan(parts=(), slowest_s=0.0, trip_s=0.0)
    assert run_with(Choice("penstock", plan, cluster, groups=())) == {"hosts": "a,a", "layer_split": "3,5"}


def test_the_plan_is_what_the_options_say(tmp_path: Path) -> None:
    file = tmp_path / "doctor.json"
    file.write_bytes(msgspec.json.encode(report()))
    found = invoke("plan", "--doctor", str(file), "--model", "llama-2-7b-fp16", "--json", "--tokens", "0")
    assert found.exit_code == 0, found.stderr
    table = json.loads(found.stdout)
    split = dict(zip(table["hosts"].split(","), map(int, table["layer_split"].split(",")), strict=True))
    assert sum(split.values()) == 32
    assert 2.5 < split["fast"] / split["localhost"] < 3.6
    said = invoke("plan", "--doctor", str(file), "--model", "demo", "--tokens", "0").stdout
    assert "Run it with --hosts" in said


def test_the_drafter_goes_to_the_last_stage_of_real_hosts_where_that_is_faster(tmp_path: Path) -> None:
    file = tmp_path / "doctor.json"
    hosts = [ExaminedHost(host="localhost", rates=[rates(0.1)]), ExaminedHost(host="fast", rates=[rates(3)])]
    links = [link("localhost", "fast", 0.9, 0.2), link("fast", "localhost", 0.9, 0.2)]
    file.write_bytes(msgspec.json.encode(DoctorReport(hosts=hosts, links=links)))
    found = invoke("plan", "--doctor", str(file), "--model", "llama-2-7b-fp16", "--json", "--tokens", "12")
    plan = json.loads(found.stdout)
    assert plan["drafter"] == "fast", found.stderr


def test_checkpoints_are_priced_by_their_shape(tmp_path: Path) -> None:
    folder = Path(model_folder("demo", "target"))
    stated = json.loads((folder / "config.json").read_text())
    price = price_of(str(folder))
    assert price.layers == stated["num_hidden_layers"]
    assert price.hidden_size == stated["hidden_size"]
    experts = Path(shutil.copytree(folder, tmp_path / "experts"))
    (experts / "config.json").write_text(json.dumps({**stated, "num_local_experts": 8}))
    with pytest.raises(ConfigError, match="cannot be priced: it is a mixture of experts"):
        price_of(str(experts))
    (experts / "config.json").write_text(json.dumps({**stated, "intermediate_size": None}))
    with pytest.raises(ConfigError, match="its configuration says no intermediate_size"):
        price_of(str(experts))


def test_what_says_nothing_is_refused(tmp_path: Path) -> None:
    nobody = DoctorReport(hosts=[ExaminedHost(host="localhost", problem="too little memory")], links=[])
    with pytest.raises(ConfigError, match="no host was measured: localhost: too little memory"):
        measured_cluster(nobody, PRICES["llama-2-7b-fp16"])
    file = tmp_path / "doctor.json"
    file.write_bytes(msgspec.json.encode(report()))
    for flags, words in (
        (["--doctor", str(file)], "model is None; it has to be the checkpoint"),
        (["--doctor", str(file), "--cluster", "demo"], "cluster or hosts or doctor has to be given, and only one"),
        ([], "cluster or hosts or doctor has to be given"),
        (["--doctor", str(tmp_path / "none.json"), "--model", "demo"], "No such file"),
    ):
        result = invoke("plan", *flags)
        assert result.exit_code == 2
        assert words in result.stderr
