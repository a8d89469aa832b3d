"""``benchmarks.gpu`` and ``benchmarks.real_pipeline`` in their smallest sizes, on this processor: every part works."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.real_pipeline.engines import engines_of
from benchmarks.shared.root import ROOT
from penstock.hosts.facts import usable_cores

SECONDS = 500
"""Time of a benchmark, of which it takes a fraction unless the host is busy."""
pytestmark = [pytest.mark.processes, pytest.mark.timeout(SECONDS + 100)]


def figures(folder: Path, *command: str) -> dict[str, dict[str, Any]]:
    """Each part's figures. All have to end well, without an error in any."""
    given = [sys.executable, "-m", *command, "--tiny", "--seconds", str(SECONDS), "--out", str(folder)]
    done = subprocess.run(given, cwd=ROOT, capture_output=True, text=True)
    found = {file.stem: json.loads(file.read_text("utf-8")) for file in folder.glob("*.json")}
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(one["outcome"] == "ended" and not one["failed"] and not one["left_out"] for one in found.values())
    assert {one["versions"]["torch"] for one in found.values()} != {None}
    return {name: one["figures"] for name, one in found.items()}


@pytest.mark.whole
def test_the_accelerators_parts_work_on_a_processor(tmp_path: Path) -> None:
    found = figures(tmp_path, "benchmarks.gpu", "--device", "cpu")
    assert found["facts"]["read_gb_s"] > 0
    assert found["facts"]["bfloat16_tflop_s"] > 0
    assert found["start"]["imports"]["touching"] == []
    assert found["start"]["model"]["predicted_bytes"] > 0
    for name, one in found["right"].items():
        for same, of in [
            one["like_cpu"],
            *(c for way in one if "," in way for d in one[way].values() for c in d.values()),
        ]:
            assert same == of > 0, name
    steps = found["steps"]["tiny Llama, bfloat16"]
    assert steps["step_ms"].keys() == {"0", "64"}
    assert steps["bound_ms"] > 0
    assert found["steps"].keys() >= {"tiny Qwen3, bfloat16", "tiny Qwen3, int4", "tiny Llama, int4"}
    assert found["kernels"]["1 row"]["launches"] > 0
    assert found["prefill"]["pieces of 32"]["tokens_per_second"] > 0
    assert found["prefill"]["pick_ms"].keys() >= {"head", "T = 0", "T = 1"}
    assert found["prefill"]["first_token"]["first_token_s"] > 0
    assert found["many"]["2 requests"]["tokens_per_second"] > 0
    assert found["pipeline"]["2 stages, ipc"]["same_tokens"]
    assert found["pipeline"]["a stage is killed"]["same_tokens"]
    assert found["pipeline"]["a stage is killed"]["recovery_s"] > 0
    assert all(times["layer_ms"] for times in found["profile"]["times"].values())


@pytest.mark.whole
@pytest.mark.skipif(usable_cores() < 2, reason="needs two cores")
def test_a_pipeline_of_processes_is_compared_with_plain_decoding(tmp_path: Path) -> None:
    found = figures(tmp_path, "benchmarks.real_pipeline", "--cores", "2")
    assert found.keys() == {"demo-float32", "demo-int8"}
    for one in found.values():
        engine = one["2 stages, draft_model"]
        assert [entry["strategy"] for entry in engine["entries"]] == [
            "autoregressive",
            "static_tree",
            "pipedec",
            "flowspec",
            "auto",
        ]
        assert all(entry["identical"] and entry["ratio"] > 0 for entry in engine["entries"])
        assert engine["numerics"] == "exact"
        assert (engine["processes"], engine["cores"], engine["own_cores"]) == (3, 2, False)


@pytest.mark.parametrize(("cores", "counts"), [(2, {2}), (3, {2, 3}), (6, {2, 4, 6}), (8, {2, 4, 8}), (64, {2, 4, 8})])
def test_there_are_as_many_stages_as_the_cores_allow(cores: int, counts: set[int]) -> None:
    assert {engine.stages for engine in engines_of("model", cores, tiny=False)} == counts
    assert {engine.stages for engine in engines_of("demo", cores, tiny=False)} == counts


def test_cores_that_are_not_there_are_refused(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.real_pipeline", "--out", str(tmp_path), "--cores", "4096"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert f"--cores is 4096; this host has {usable_cores()}" in done.stderr
