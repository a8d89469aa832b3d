"""The ``penstock`` command as a user runs it: streaming, JSON, traces, Ctrl-C, and nothing left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import psutil
import pytest

from tests.checkpoints import make_checkpoint
from tests.processes import alive
from tests.terminals import PATIENCE, PENSTOCK, READY, terminal
from tests.unit.cli.invoke import invoke
from tests.unit.lab.png import png_size
from tests.warm import Warm
from tests.warm import run as run_warm

pytestmark = pytest.mark.processes

PROMPT = "def main():\n    "
SAMPLED = ["--temperature", "1", "--seed", "5", "--max-tokens", "40", "--ignore-eos"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder laid out like the shipped pair: target, draft, prompts."""
    folder = tmp_path_factory.mktemp("pair")
    make_checkpoint(folder / "target", tokenizer=True, max_position_embeddings=40_000)
    make_checkpoint(folder / "draft", tokenizer=True, seed=1, num_hidden_layers=1, max_position_embeddings=40_000)
    (folder / "prompts.jsonl").write_text(json.dumps({"prompt": PROMPT}) + "\n")
    return folder


def run(
    *arguments: str, stdin: str | None = None, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run([PENSTOCK, *arguments], input=stdin, capture_output=True, text=True, timeout=120, env=env)


def forked(*arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    """Like ``run``, as a fork of a process that has imported what commands need."""
    return run_warm([PENSTOCK, *arguments], stdin)


def test_json_trace_and_stream_agree(pair: Path, tmp_path: Path) -> None:
    """A speculating run that reports as JSON and a plain one that streams from a pipe write the same text."""
    model = ["generate", "--model", str(pair / "target")]
    trace = tmp_path / "trace.json"
    drafting = ["--draft-model", str(pair / "draft"), "-pp", "2", "--trace", str(trace)]
    spoken = forked(*model, PROMPT, *SAMPLED, *drafting, "--json")
    assert spoken.returncode == 0, spoken.stderr
    check_report(json.loads(spoken.stdout))
    check_trace(json.loads(trace.read_text()))
    check_summary(forked("trace", str(trace), "--json"))
    streamed = forked(*model, *SAMPLED, "--strategy", "autoregressive", stdin=PROMPT)
    assert streamed.returncode == 0, streamed.stderr
    assert streamed.stdout == json.loads(spoken.stdout)["text"]
    assert beside_progress(streamed.stderr) == "", "statistics are for terminals"


def beside_progress(log: str) -> str:
    """Return a command's stderr without the progress lines of a slow start."""
    return re.sub(r"^.*, \d+:\d\d:\d\d so far.*\n", "", log, flags=re.MULTILINE)


def check_report(report: dict[str, Any]) -> None:
    assert report["prompt"] == PROMPT
    assert len(report["token_ids"]) == 40
    assert len(report["prompt_token_ids"]) == len(PROMPT)
    assert report["finish_reason"] == "length"
    metrics = report["metrics"]
    assert metrics["tokens"] == 40
    assert metrics["tokens_per_second"] > 0
    assert metrics["mean_acceptance_length"] == pytest.approx(1 + metrics["accepted"] / max(metrics["drafts"], 1))
    assert metrics["accepted"] + metrics["misses"] <= 40
    assert (metrics["strategy"], metrics["method"], metrics["stages"]) == ("auto", "draft_model", 2)
    assert not metrics["emulated"]


def check_summary(result: subprocess.CompletedProcess[str]) -> None:
    assert result.returncode == 0, result.stderr
    summary = json.loads(result.stdout)
    assert summary["tokens"] == 40
    assert len(summary["stages"]) == 2
    assert summary["drafter"]["rounds"] > 0
    for stage in summary["stages"]:
        assert stage["busy"] * summary["seconds"] + sum(stage["idle"].values()) == pytest.approx(summary["seconds"])


def check_trace(trace: dict[str, Any]) -> None:
    by_track: dict[str, list[str]] = {}
    names = {e["tid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    for event in trace["traceEvents"]:
        if event["ph"] != "M":
            by_track.setdefault(names[event["tid"]], []).append(event["name"])
    stages = [names for track, names in by_track.items() if track.startswith("stage")]
    assert len(stages) == 2
    assert stages[0] == stages[1] == [f"batch {i}" for i in range(len(stages[0]))]
    assert "draft" in by_track["drafter"]
    assert any(name.startswith("commit") for name in by_track["engine"])


@pytest.mark.parametrize("again", [False, True])
def test_ctrl_c_prints_what_there_is_and_leaves_no_process(pair: Path, again: bool) -> None:
    """Also where it is typed ``again`` and again until the command has ended."""
    endless = ["--max-tokens", "19000", "--max-model-len", "20000", "--ignore-eos", "--temperature", "1"]
    command = [PENSTOCK, "generate", PROMPT, "--model", str(pair / "target"), "-pp", "2", *endless]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    first = process.stdout.read(1)
    assert first, process.communicate()  # it has ended before its first token, and says why
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) == 3, "the fork server and two stages"
    process.send_signal(signal.SIGINT)
    with ThreadPoolExecutor(1) as apart:
        ended = apart.submit(process.communicate, timeout=20)
        while again and not ended.done():
            time.sleep(0.02)
            process.send_signal(signal.SIGINT)
        _, errors = ended.result()
    assert process.returncode == 130
    assert beside_progress(errors.decode()) == ""
    assert not still_running(children)


def test_a_terminal_is_asked_for_a_prompt_and_told_why_the_text_ends(pair: Path) -> None:
    flags = ("--model", str(pair / "target"), "--dtype", "float32", "--max-tokens", "5", "--ignore-eos")
    with terminal("generate", *flags, popen=Warm) as process:
        process.until(READY)
        process.type("\r")  # nothing: it is asked for again
        assert "Prompt:" in process.until(READY)
        process.type("\x1b[200~import os\nimport re\x1b[201~\r")
        process.until("exact numerics")
        process.until("5 tokens")
        process.until("cut at 5 tokens; --max-tokens allows more")
        assert process.process.wait(PATIENCE) == 0


def test_a_terminal_is_told_the_numerics_before_the_text(pair: Path) -> None:
    flags = ("--model", str(pair / "target"), "-pp", "2", "--max-tokens", "4", "--ignore-eos")
    with terminal("generate", PROMPT, *flags, popen=Warm) as process:
        assert "5 layers in float32, exact numerics, 2 stages" in " ".join(process.until("loaded in").split())
        assert "numerics" not in process.until("4 tokens")
        assert process.process.wait(PATIENCE) == 0


def still_running(processes: list[psutil.Process]) -> list[psutil.Process]:
    _, left = psutil.wait_procs(processes, timeout=2)
    return [process for process in left if alive(process)]


def test_an_error_before_the_start_comes_at_once(tmp_path: Path) -> None:
    """The error comes before anything is imported that takes seconds."""
    for name in ("torch", "transformers"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported')")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    result = run("generate", "x", "--strategy", "pipdec", env=environment)
    assert result.returncode == 2
    assert result.stderr.startswith("penstock: error: strategy is 'pipdec'")
    assert run("--version", env=environment).stdout.startswith("penstock ")
    assert "imported" in run("generate", "x", "--model", "demo", env=environment).stderr, "where they are needed"


DEMO: Final = """
import sys
from pathlib import Path
from penstock.engine import options
from penstock.lab import demo
options.DEMO, demo.TOKENS = Path(sys.argv[1]), 6
demo.run_demo(as_json=True, embedded=True)
"""
"""The demo with another pair, and fewer tokens."""


def test_demo_prints_one_json_object(pair: Path) -> None:
    done = run_warm([sys.executable, "-c", DEMO, str(pair)])
    result = json.loads(done.stdout)
    assert result["identical"] is True
    assert result["speedup"] > 0
    assert [run["strategy"] for run in result["runs"]] == ["autoregressive", "auto"]
    assert all(run["emulated"] for run in result["runs"])
    assert "Emulated" in done.stderr
    assert "The pair that comes with the package" in done.stderr


def test_bench_reports_and_compares(pair: Path, tmp_path: Path) -> None:
    """Two prompt sets, two temperatures, two seeds, three strategies, one of them with options of its own."""
    chat = tmp_path / "question.jsonl"
    chat.write_text(json.dumps({"turns": [PROMPT, "and then?"]}) + "\n" + json.dumps({"turns": ["x = "]}) + "\n")
    folder = tmp_path / "report"
    result = invoke(
        *("bench", "--model", str(pair / "target"), "--draft-model", str(pair / "draft"), "--cluster", "local-2"),
        *("--strategies", "autoregressive,pipedec[width=3,children=2],static_tree[tree_size=4]"),
        *("--prompts", str(chat), "--prompts", str(pair / "prompts.jsonl"), "--temperature", "0,1", "--seeds", "2"),
        *("--max-tokens", "8", "--report", str(folder)),
    )
    assert result.exit_code == 0, result.stderr
    assert "one seed was run, not 2" in " ".join(result.stdout.split())
    saved = json.loads((folder / "bench.json").read_text())
    check_runs(saved["runs"])
    assert {(one["prompt_set"], one["temperature"]) for one in saved["small_model"]} == SETTINGS
    assert all(one["tokens_per_second"] > 0 and not one["modelled"] for one in saved["small_model"])
    assert saved["settings"]["prompts"] == ["question.jsonl", "prompts.jsonl"]
    check_files(folder)
    same = invoke("compare", str(folder / "bench.json"), str(folder / "bench.json"))
    assert same.exit_code == 0, same.stderr
    assert same.stdout.count("1.000") == 12
    assert "Only in" not in same.stdout


def test_simulate_reports(tmp_path: Path) -> None:
    """A sweep over stages and width on two clusters, one of them drawn at random."""
    result = invoke(
        *("simulate", "--cluster", "demo", "--cluster", "random-3", "--strategies", "pipedec,static_tree"),
        *("--sweep", "stages=2..8,width=4..8", "--tokens", "60", "--tokens-per-request", "20"),
        *("--report", str(tmp_path / "report")),
    )
    assert result.exit_code == 0, result.stderr
    assert "demo, 8 stages, simulated" in result.stdout
    assert "(the demo pair's at T = 1)" in " ".join(result.stdout.split())
    saved = json.loads((tmp_path / "report" / "simulate.json").read_text())
    assert saved["simulated"]
    assert len(saved["runs"]) == 2 * 3 * 4
    assert all(run["speedup"] > 1 for run in saved["runs"] if run["strategy"] != "autoregressive")
    report = (tmp_path / "report" / "report.md").read_text()
    for cluster in ("demo", "random-3"):
        for name in (f"speedup-stages-{cluster}.png", f"stages-width-pipedec-{cluster}.png"):
            assert f"]({name})" in report
            assert min(png_size(tmp_path / "report" / name)) > 100


SETTINGS = {(name, temperature) for name in ("question", "prompts") for temperature in (0.0, 1.0)}


def check_runs(runs: list[dict[str, Any]]) -> None:
    labels = ["autoregressive", "pipedec[width=3,children=2]", "static_tree[tree_size=4]"]
    assert [one["strategy"] for one in runs] == labels * 4
    assert {(one["prompt_set"], one["temperature"]) for one in runs} == SETTINGS
    for one in runs:
        assert one["identical_to_autoregressive"]
        asked = (2 if one["prompt_set"] == "question" else 1) * (2 if one["temperature"] else 1)
        assert len(one["requests"]) == asked
        assert 0 < one["mean_ttft_ms"] < one["mean_e2el_ms"]
        assert one["efficiency"] == pytest.approx(one["wall_clock_speedup"] / one["theoretical_speedup"])
        assert (one["wall_clock_speedup_interval"] is None) is (asked == 1)
        if one["strategy"] == "autoregressive":
            assert (one["theoretical_speedup"], one["wall_clock_speedup"]) == (pytest.approx(1), pytest.approx(1))
            assert one["draft_acceptance_rate"] is None
            assert one["options"] == {}
        elif one["temperature"] and "tree" in one["strategy"]:  # greedily a random model loops: left out
            assert 0 <= one["draft_acceptance_rate"] <= 1
            assert one["decided_by_depth"][0] >= one["hit_by_depth"][0]
    assert runs[1]["options"] == {"width": 3, "children": 2}


def check_files(folder: Path) -> None:
    text = (folder / "report.md").read_text()
    for name, temperature in SETTINGS:
        assert f"## {name}, T = {temperature:g}" in text
    pictures = {path.name: png_size(path) for path in folder.glob("*.png")}
    sampled = {"speedup.png", "timeline.png", "hit-rate-question-T1.png", "hit-rate-prompts-T1.png"}
    assert sampled <= set(pictures) <= {*sampled, "hit-rate-question-T0.png", "hit-rate-prompts-T0.png"}
    assert all(f"]({name})" in text for name in pictures)
    assert all(400 < width < 2000 and 200 < height < 2000 for width, height in pictures.values())


def test_what_bench_and_compare_cannot_read_is_one_line(tmp_path: Path) -> None:
    broken = tmp_path / "question.jsonl"
    broken.write_text(json.dumps({"turns": ["a"]}) + "\n" + json.dumps({"question": "b"}) + "\n")
    result = forked("bench", "--prompts", str(broken))
    assert (result.returncode, result.stderr.count("\n")) == (2, 1)
    assert f"{broken}, line 2: needs a field 'prompt'" in result.stderr
    entry = invoke("bench", "--strategies", "pipedec[widht=3]")
    assert entry.exit_code == 2
    assert "entry 'pipedec[widht=3]': option 'widht' is unknown" in entry.stderr
    none = invoke("compare", str(broken), str(broken))
    assert none.exit_code == 2
    assert none.stderr.startswith(f"penstock: error: {broken}: is not JSON")
