"""``penstock plan``: what it chooses, what it says, and what it refuses."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from penstock.cluster import load_cluster, load_devices, stage_timings
from penstock.core import ConfigError
from penstock.lab.plan import PlanOutcome, run_plan
from penstock.lab.plan_choices import SPECULATIVE_BATCH, Planning, PlanOptions
from tests.unit.cli.invoke import invoke

UNEQUAL = "jupiter-heterogeneous"


def plan(**options: Any) -> tuple[PlanOutcome, str]:
    """Return the plan that is chosen, and the text that is printed."""
    console = Console(file=io.StringIO(), width=200)
    (outcome,) = run_plan(PlanOptions(**{"cluster": UNEQUAL, "tokens": 0, **options}), console=console)
    assert isinstance(console.file, io.StringIO)
    return outcome, console.file.getvalue()


def test_a_slow_board_is_left_out_where_that_is_faster() -> None:
    outcome, shown = plan(tokens=24, prompt_tokens=128)
    assert [stage.devices for stage in outcome.chosen.cluster.stages] == [("tx2-1",), ("tx2-2",), ("nx-1",)]
    answers = {choice.name: choice.speed.answer_s for choice in outcome.compared if choice.speed is not None}
    assert set(answers) == {"penstock", "even split", "in proportion to speed", "jupiter"}
    assert answers["penstock"] == min(answers.values()) < answers["jupiter"] / 1.05
    assert "left out: nano-1" in shown
    assert "Limited by stage 3, nx-1" in shown
    assert re.search(r"One more like nx-1: an answer in [\d.]+ s in place of [\d.]+\.", shown)


def test_a_slow_board_holds_layers_only_for_a_drafter_that_is_often_right() -> None:
    options = {"tokens": 24, "prompt_tokens": 128, "bandwidth_gbit_s": 0.94}
    often, said = plan(**options, accuracy=(0.95, 0.98))
    seldom, _ = plan(**options, accuracy=(0.3, 0.4))
    assert len(often.chosen.cluster.stages) == 4
    assert len(seldom.chosen.cluster.stages) < 4
    assert "a drafter as often right as --accuracy says" in said


def test_what_one_more_device_brings_is_what_the_goal_counts() -> None:
    """One more fast board makes stages faster, but hardly helps plain decoding of one request: a trip stays a trip."""
    assert "One more like nx-1: a slowest stage of" in plan()[1]
    assert re.search(r"One more like nx-1: [\d.]+ tokens/s in place of", plan(tokens=8, goal="throughput")[1])
    assert "One more like nx-1 would bring nothing." in plan(goal="ttft")[1]


def test_the_drafter_does_not_slow_an_answer_down_for_nanoseconds_of_its_first_token() -> None:
    outcome, _ = plan(cluster="random-1:2", goal="ttft", tokens=24)
    assert outcome.chosen.cluster.drafter == "drafter"
    assert len(outcome.chosen.cluster.stages) == 1


def test_of_many_devices_that_are_left_out_a_few_are_named() -> None:
    outcome, shown = plan(cluster="random-1:64")
    used = len(outcome.chosen.cluster.stages)
    assert f"and {64 - used - 7} others." in " ".join(shown.split())


def test_the_papers_method_keeps_every_device_in_its_place() -> None:
    outcome, _ = plan(method="jupiter")
    assert [sum(stage.layers) for stage in outcome.chosen.cluster.stages] == [3, 9, 9, 11]


@pytest.mark.parametrize("seed", range(12))
def test_no_plan_by_hand_has_a_faster_slowest_stage(seed: int) -> None:
    """Clusters are random; the times are those that the cluster's own stages then take."""
    outcome, _ = plan(cluster=f"random-{seed}:{seed % 5 + 2}")
    chosen, *others = outcome.compared
    assert all(chosen.plan.slowest_s <= other.plan.slowest_s * (1 + 1e-9) for other in others)
    slowest = max(
        stage.seconds(SPECULATIVE_BATCH.rows, SPECULATIVE_BATCH.attended) for stage in stage_timings(chosen.cluster)
    )
    assert slowest <= chosen.plan.slowest_s * (1 + 1e-9)


def test_json_has_what_scripts_read() -> None:
    found = invoke("plan", "--cluster", UNEQUAL, "--json", "--tokens", "0", "--goal", "throughput")
    assert found.exit_code == 0
    table = json.loads(found.stdout)
    assert sum(stage["layers"] for stage in table["stages"]) == 32
    assert table["slowest_stage_ms"] >= table["least_slowest_stage_ms"]
    assert set(table["compared"]) == {"even split", "in proportion to speed", "jupiter"}
    assert table["compared"]["jupiter"]["layers"] == {"nano-1": 3, "tx2-1": 9, "tx2-2": 9, "nx-1": 11}
    assert table["one_more"]["slowest_stage_ms"] < table["slowest_stage_ms"]


def test_a_written_plan_is_a_cluster_file(tmp_path: Path) -> None:
    file = tmp_path / "plan.toml"
    outcome, _ = plan(output=file, model="llama-2-13b-4bit")
    loaded = load_cluster(str(file))
    assert loaded.stages == outcome.chosen.cluster.stages
    assert stage_timings(loaded) == stage_timings(outcome.chosen.cluster)
    assert loaded.links == outcome.chosen.cluster.links


def test_devices_without_stages_are_enough(tmp_path: Path) -> None:
    file = tmp_path / "boards.toml"
    file.write_text(
        """
name = "boards"
as_model = "tinyllama-1.1b-fp16"
devices = [{ name = "a", host = "x", kind = "k" }, { name = "b", host = "y", kind = "k", memory_gb = 1.2 }]
kinds.k = { memory_gb = 3, weight_bandwidth_gb_s = 50, compute_tflops = 2, overhead_ms = 1 }
links.network = { bandwidth_gbit_s = 1, latency_ms = 0.2 }
"""
    )
    assert load_devices(str(file)).stages[1].devices == ("b",)
    outcome, shown = plan(cluster=str(file), goal="throughput")
    assert [stage.devices for stage in outcome.chosen.cluster.stages] in ([("a",), ("b",)], [("b",), ("a",)])
    assert "Nothing drafts" not in shown
    with pytest.raises(ConfigError, match=r"no plan fits: the model needs .* GB .*devices have, in GB: a 3, b 1\.2"):
        plan(cluster=str(file), model="llama-2-7b-fp16")


MEASURED = """
name = "measured"
devices = [{ name = "a", kind = "gpu" }, { name = "b", kind = "gpu" }, { name = "c", kind = "gpu" }]
[as_model]
layers = 12
hidden_size = 64
layer_parameters = 1_000_000
head_parameters = 2_000_000
[kinds.gpu]
pass_ms = 4.0
compute_tflops = 1000
[links.local]
bandwidth_gbit_s = 100
latency_ms = 0.01
"""


def test_a_measured_pass_is_that_of_the_layers_which_the_file_gives_it(tmp_path: Path) -> None:
    """a reads 4 layers in 4 ms, 1 ms each, and b its 8 and the head in as long: 0.4 ms. c is like the first."""
    file = tmp_path / "measured.toml"
    stages = 'stages = [{ devices = ["a"], layers = 4 }, { devices = ["b"], layers = 8 }]\n'
    file.write_text(stages + MEASURED)
    devices = {one.name: one for one in load_devices(str(file)).devices}
    assert {name: one.weight_bandwidth_gb_s for name, one in devices.items()} == {"a": 2.0, "b": 5.0, "c": 2.0}
    outcome, _ = plan(cluster=str(file), output=tmp_path / "plan.toml")
    assert outcome.chosen.plan.slowest_s <= 4e-3
    assert stage_timings(load_cluster(str(tmp_path / "plan.toml"))) == stage_timings(outcome.chosen.cluster)
    file.write_text(MEASURED)
    with pytest.raises(ConfigError, match=r"devices\[0\].pass_ms holds for layers that no stage of the file states"):
        plan(cluster=str(file))


def test_presets_with_measured_stages_are_planned() -> None:
    outcome, _ = plan(cluster="spd-4")
    assert [sum(stage.layers) for stage in outcome.chosen.cluster.stages] == [8, 8, 8, 8]
    assert 8.05e-3 < outcome.chosen.plan.slowest_s < 8.25e-3, "with the KV of 512 tokens"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--cluster", "dmo"], "did you mean 'demo'?"),
        (["--cluster", "local-2"], "as_model is None; it has to be named"),
        (["--goal", "latancy"], "did you mean 'latency'?"),
        (["--method", "paper"], "method is 'paper'"),
        (["--model", "llama-2-7b"], "did you mean 'llama-2-7b-fp16'?"),
        (["--model", "llama-3.1-70b-bf16"], "no plan fits: the model needs"),
        (["--model", "llama-3.1-70b-bf16", "--method", "jupiter"], "let --method penstock leave devices out"),
        (["--tokens", "1"], "tokens is 1; it has to be 0, or 2 to 10,000,000"),
        (["--prompt-tokens", "0"], "prompt_tokens is 0"),
        (["--accuracy", "0.8,0.7"], "accuracy"),
        (["--output", "plan.json"], "a file that ends in .toml"),
        (["-dp", "2"], "data_parallel_size is 2, and only hosts are divided among engines"),
        (["-dp", "0"], "data_parallel_size is 0; it has to be at least 1"),
        (["--hosts", "a,b,c", "--model", "demo", "-dp", "2"], "hosts names 3; that has to be a multiple of it"),
    ],
)
def test_what_cannot_be_planned_is_refused(flags: list[str], words: str) -> None:
    cluster = [] if {"--cluster", "--hosts"} & {*flags} else ["--cluster", UNEQUAL]
    result = invoke("plan", *cluster, *flags)
    assert result.exit_code == 2
    assert words in result.stderr
    assert result.stderr.count("\n") == 1


GROUPS = """
name = "groups"
as_model = "llama-2-7b-fp16"
engine = "e"
devices = [{ name = "a", kind = "k" }, { name = "b", kind = "k" }, { name = "c", kind = "k" }, { name = "e" }]
kinds.k = { memory_gb = 16, weight_bandwidth_gb_s = 700, compute_tflops = 20, overhead_ms = 0.5 }
"""
FAST = "links.local = { bandwidth_gbit_s = 400, latency_ms = 0.005 }\n"
SLOW = "links.local = { bandwidth_gbit_s = 0.94, latency_ms = 0.2 }\n"


def grouped(file: Path, link: str, **options: Any) -> tuple[PlanOutcome, str]:
    file.write_text(GROUPS + link)
    return plan(cluster=str(file), tokens=8, **options)


def test_groups_are_chosen_where_their_link_is_fast(tmp_path: Path) -> None:
    """Two cards share what one alone reads in 19 ms; the 128 gathers take 0.6 ms of latency, or 26 ms of it."""
    outcome, shown = grouped(tmp_path / "fast.toml", FAST, output=tmp_path / "plan.toml")
    (stage,) = outcome.chosen.cluster.stages
    assert (stage.devices, stage.layers, stage.split) == (("a", "b"), (32,), "tensors")
    assert outcome.chosen.value("latency") > max(one.value("latency") for one in outcome.compared[1:])
    assert "a + b" in shown
    assert "left out: c" in shown
    assert "Devices joined by + are the tensor parallel ranks of one stage" in " ".join(shown.split())
    loaded = load_cluster(str(tmp_path / "plan.toml"))
    assert loaded.stages == outcome.chosen.cluster.stages
    assert stage_timings(loaded) == stage_timings(outcome.chosen.cluster)
    outcome, shown = grouped(tmp_path / "slow.toml", SLOW)
    assert not any(stage.tensor_parallel for stage in outcome.chosen.cluster.stages)
    assert "ranks" not in shown


def test_many_requests_want_single_devices(tmp_path: Path) -> None:
    """Stages of single devices serve as many rows each as a group does, and exchange nothing."""
    outcome, _ = grouped(tmp_path / "fast.toml", FAST, goal="throughput")
    assert not any(stage.tensor_parallel for stage in outcome.chosen.cluster.stages)
    assert len(outcome.chosen.cluster.stages) == 3


def test_json_names_a_groups_ranks(tmp_path: Path) -> None:
    (tmp_path / "fast.toml").write_text(GROUPS + FAST)
    found = invoke("plan", "--cluster", str(tmp_path / "fast.toml"), "--json", "--tokens", "8")
    table = json.loads(found.stdout)
    assert table["stages"] == [{"device": "a", "layers": 32, "ranks": ["a", "b"]}]
    assert table["left_out"] == ["c"]
    assert table["limited_by"] == "stage 1, a + b"
    assert table["one_more"] is None, "the file has no link to a further host"


def test_plans_of_real_hosts_join_nothing(tmp_path: Path) -> None:
    (tmp_path / "fast.toml").write_text(GROUPS + FAST)
    cluster = load_devices(str(tmp_path / "fast.toml"))
    assert len(Planning(cluster, PlanOptions(cluster="fast", tokens=0)).joined()) == 1
    assert Planning(cluster, PlanOptions(doctor=tmp_path / "doctor.json", model="any", tokens=0)).joined() == []
