"""``penstock simulate``: what it compares, what it says of it, and which recordings it takes."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from penstock.cluster import load_cluster
from penstock.core import ConfigError
from penstock.lab.grid import WARM_UP
from penstock.lab.script import profile_script
from penstock.lab.simulate import SimulatedRun, SimulateOptions, parse_sweep, run_simulate
from penstock.lab.simulator import simulate
from penstock.speculation import SpeculativeConfig
from tests.recordings import DRAFT, make_recording
from tests.unit.lab.png import png_size

SMALL: dict[str, Any] = {"tokens": 60, "tokens_per_request": 20, "accuracy": (0.6, 0.8)}


def simulated(**given: Any) -> tuple[list[SimulatedRun], str]:
    """Return the runs, and the text printed on 80 columns."""
    console = Console(file=io.StringIO(), width=80)
    options = SimulateOptions(**{"clusters": ("spd-4",), "strategies": ("pipedec",), **given})
    runs = run_simulate(options, console)
    assert isinstance(console.file, io.StringIO)
    return runs, console.file.getvalue()


def test_plain_decoding_is_always_there_and_what_the_others_are_compared_with() -> None:
    runs, printed = simulated(**SMALL, strategies=("static_tree", "pipedec"))
    assert [run.strategy for run in runs] == ["autoregressive", "static_tree", "pipedec"]
    plain, *others = runs
    assert (plain.speedup, plain.speedup_interval, plain.hit_rate) == (1.0, [1.0, 1.0], None)
    for run in others:
        assert run.speedup == pytest.approx(plain.seconds / run.seconds, rel=0.1)
        low, high = run.speedup_interval or (0, 0)
        assert low < run.speedup < high
        assert run.ms_per_token == pytest.approx(1e3 / run.tokens_per_second)
        assert run.rows_per_token > 1
    assert "spd-4, 4 stages, simulated" in printed
    assert "profile 0.6, 0.8; 60 tokens in 3 requests" in " ".join(printed.split())
    assert "…" not in printed, "nothing is cut off"


def test_the_hit_rate_is_the_profiles_at_that_many_children() -> None:
    (_, run), _ = simulated(
        strategies=("pipedec[width=1,children=1]",), accuracy=(0.6, 0.8), tokens=1000, tokens_per_request=100
    )
    assert run.hit_rate == pytest.approx(0.6, abs=0.04)


def test_every_strategy_begins_with_a_request_that_does_not_count() -> None:
    runs, _ = simulated(**SMALL, strategies=("auto", "continuous"))
    script = profile_script(SMALL["accuracy"], 3, 20, seed=0)
    for run in runs[1:]:
        config = SpeculativeConfig(strategy=run.strategy)
        expected = simulate(load_cluster("spd-4"), script, config, WARM_UP)
        assert [one["seconds"] for one in run.requests] == [found.seconds for found in expected]


def test_without_a_profile_it_is_the_demo_pairs_and_says_so() -> None:
    _, printed = simulated(tokens=20, tokens_per_request=10, strategies=("autoregressive",))
    assert "(the demo pair's at T = 1)" in " ".join(printed.split())


def test_stages_swept_are_like_the_clusters_first() -> None:
    runs, printed = simulated(**SMALL, strategies=("autoregressive",), sweep=parse_sweep("stages=2..8"))
    assert [run.stages for run in runs] == [2, 4, 8]
    per_stage = [run.ms_per_token / run.stages for run in runs]
    assert per_stage == pytest.approx([per_stage[0]] * 3, rel=0.05)
    assert "each is like the cluster's first" in " ".join(printed.split())


def test_every_number_of_stages_of_a_random_cluster_is_a_draw_of_its_own() -> None:
    sweep = parse_sweep("stages=2..4")
    runs, _ = simulated(**SMALL, clusters=("random-7",), strategies=("autoregressive",), sweep=sweep)
    alone = [
        simulated(**SMALL, clusters=(f"random-7:{n}",), strategies=("autoregressive",))[0][0].seconds for n in (2, 4)
    ]
    assert [run.seconds for run in runs] == alone


def test_the_report_has_table_plots_and_every_figure(tmp_path: Path) -> None:
    sweep = parse_sweep("width=2..4,children=2..4")
    runs, _ = simulated(**SMALL, sweep=sweep, report=tmp_path, json=tmp_path / "out.json")
    report = (tmp_path / "report.md").read_text()
    for name in ("speedup-width-spd-4.png", "width-children-pipedec-spd-4.png"):
        assert f"]({name})" in report
        assert min(png_size(tmp_path / name)) > 100
    assert "spd-4, 4 stages, simulated" in report
    content = json.loads((tmp_path / "out.json").read_text())
    assert content == json.loads((tmp_path / "simulate.json").read_text())
    assert content["simulated"]
    assert [run["speedup"] for run in content["runs"]] == [run.speedup for run in runs]
    assert {run.strategy for run in runs} >= {"pipedec[width=2,children=4]", "pipedec[width=4,children=2]"}


def test_recordings_give_their_requests_and_name(tmp_path: Path) -> None:
    path = tmp_path / "r.safetensors"
    make_recording((1, 8, 9)).save(path)
    runs, printed = simulated(recordings=(path,), tokens=40, tokens_per_request=6)
    assert "recording r.safetensors; 12 tokens in 2 requests" in " ".join(printed.split())
    assert [one["tokens"] for one in runs[0].requests] == [5, 5]


def test_recordings_of_other_models_are_refused_together(tmp_path: Path) -> None:
    one, other = tmp_path / "one.safetensors", tmp_path / "other.safetensors"
    recording = make_recording()
    recording.save(one)
    draft = replace(DRAFT, config="d1" * 32)
    replace(recording, header=replace(recording.header, draft=draft)).save(other)
    with pytest.raises(ConfigError, match=r"other\.safetensors: draft\.config is d1d1"):
        simulated(recordings=(one, other))
    with pytest.raises(ConfigError, match="accuracy is set beside a recording"):
        simulated(recordings=(one,), accuracy=(0.5,))


def test_a_cluster_without_a_drafter_decodes_plainly_only(tmp_path: Path) -> None:
    file = tmp_path / "plain.toml"
    file.write_text(
        """
name = "plain"
as_model = "llama-3.2-1b-fp32"
devices = [{ name = "a", weight_bandwidth_gb_s = 100, compute_tflops = 10, overhead_ms = 1 }]
stages = [{ devices = ["a"] }]
"""
    )
    runs, _ = simulated(**SMALL, clusters=(str(file),), strategies=("autoregressive",))
    assert runs[0].speedup == 1.0
    with pytest.raises(ConfigError, match="plain names no drafter; add drafter and draft_as_model"):
        simulated(**SMALL, clusters=(str(file),))


def test_a_drafter_in_several_places_is_a_cluster_each() -> None:
    runs, printed = simulated(**SMALL, strategies=("pipedec",), drafter_on=("engine", "last-stage"))
    assert [run.cluster for run in runs] == ["spd-4 @ engine"] * 2 + ["spd-4 @ last-stage"] * 2
    apart, shared = (run for run in runs if run.strategy == "pipedec")
    assert shared.tokens_per_second < apart.tokens_per_second
    assert "spd-4 @ last-stage, 4 stages, simulated" in printed
