"""The report's files, from made-up runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.lab.bench.comparison import SmallModel
from penstock.lab.bench.meter import Bar, Timeline
from penstock.lab.bench.report import page_of, report_of
from penstock.lab.bench.summary import StrategyRun
from tests.unit.lab.bench.runs import a_run
from tests.unit.lab.png import png_size

TIMELINE = Timeline(2, (Bar(0, 0.0, 1.0, 1, True), Bar(1, 1.0, 2.0, 1, False)), ((2.0, 1),))


def some_runs(**other: Any) -> list[StrategyRun]:
    """Plain, a static tree, and PipeDec at two widths and two numbers of children."""
    plain = a_run("autoregressive", 2.0, wall_clock_speedup=1.0, wall_clock_speedup_interval=[1.0, 1.0], **other)
    fed: dict[str, Any] = {"decided_by_depth": [9, 0, 4], "hit_by_depth": [7, 0, 1], **other}
    runs = [plain, a_run("static_tree", 3.0, wall_clock_speedup=1.5, **fed)]
    for width, children in ((4, 2), (4, 8), (16, 2), (16, 8)):
        options = {"width": width, "children": children}
        label = f"pipedec[width={width},children={children}]"
        runs.append(a_run(label, 4.0, wall_clock_speedup=2.0 + width / 16, options=options, **fed))
    return runs


def report(folder: Path, runs: list[StrategyRun]) -> str:
    settings = {"cluster": "demo", "temperature": [0.0, 0.6], "versions": {"penstock": "1"}}
    small = [SmallModel("chat", 0.0, 30.0, modelled=True)]
    made = report_of(settings, runs, small, said=["Said."])
    made.write_folder(folder, "bench", "Strategies compared", page_of(folder, runs, small, []))
    return (folder / "report.md").read_text()


def test_the_report_holds_tables_plots_and_settings(tmp_path: Path) -> None:
    runs = some_runs(timeline=TIMELINE) + some_runs(prompt_set="my code", temperature=0.6)
    text = report(tmp_path, runs)
    files = {path.name for path in tmp_path.iterdir()}
    assert files == {
        "report.md",
        "bench.json",
        "speedup.png",
        "timeline.png",
        *(f"{kind}-{of}.png" for kind in ("hit-rate", "pipedec-sweep") for of in ("chat-T0", "my code-T0.6")),
    }
    assert "](hit-rate-my%20code-T0.6.png)" in text
    for words in (
        "## chat, T = 0, emulated",
        "- Said.",
        "small model alone",
        '`{"penstock": "1"}`',
        "| `cluster` | demo |",
    ):
        assert words in text
    for name in files:
        if name.endswith(".png"):
            width, height = png_size(tmp_path / name)
            assert width > 400
            assert height > 200
    saved = json.loads((tmp_path / "bench.json").read_text())
    assert len(saved["runs"]) == len(runs)
    assert saved["small_model"][0]["tokens_per_second"] == 30.0


@pytest.mark.parametrize("kept", [1, 2, 3, 4])
def test_plots_that_would_show_nothing_are_left_out(tmp_path: Path, kept: int) -> None:
    """Plain decoding has no hit rate; one width, or one number of children, is no sweep."""
    text = report(tmp_path, some_runs()[:kept])
    assert ("hit-rate" in text) is (kept > 1)
    assert "pipedec-sweep" not in text
    assert "timeline" not in text
    assert "](speedup.png)" in text


def test_two_settings_that_differ_in_both_are_no_sweep(tmp_path: Path) -> None:
    runs = [
        run for run in some_runs() if run.options not in ({"width": 4, "children": 8}, {"width": 16, "children": 2})
    ]
    assert "pipedec-sweep" not in report(tmp_path, runs)


def test_runs_without_a_second_token_have_no_plot(tmp_path: Path) -> None:
    text = report(tmp_path, [a_run("autoregressive", 1.0)])
    assert "![" not in text
