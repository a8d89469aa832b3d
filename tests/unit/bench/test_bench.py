"""The bench's arithmetic, its prompt files and its refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.bench.command import BenchOptions, named_strategies, tables_of
from penstock.bench.measure import StrategyRun, is_looping
from penstock.bench.meter import Meter
from penstock.bench.prompts import read_prompts
from penstock.cluster.timing import LinkTiming
from penstock.core import ConfigError
from penstock.engine.commit import Advance
from penstock.messages import Batch, Result, Rows, Span


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([1, 2, 3] * 4, True),
        ([9, 8, 7] + [5] * 12, True),
        ([5] * 11, False),
        ([1, 2, 3, 4] * 3, True),
        ([1, 2, 3, 4] * 2, False),
        (list(range(40)), False),
        ([1, 2, 3] * 4 + [9], False),
        ([], False),
    ],
)
def test_looping_outputs_are_those_that_end_in_a_repeated_phrase(tokens: list[int], expected: bool) -> None:
    assert is_looping(tokens) is expected


def span(stage: int, start: float, end: float, rows: int = 1, computed: float = 0.0) -> Span:
    return Span(stage, start, start, end, computed, modelled=end - start, rows=rows)


def watched(results: list[Result], submitted: list[float]) -> Meter:
    meter = Meter(2, None)
    for stream, (result, at) in enumerate(zip(results, submitted, strict=True)):
        meter.submitted(Batch(stream=stream, rows=Rows([0], [stream], [0], [0], [0], [0])), at)
        meter.arrived(result, result.spans[-1].end)
        meter.advanced(None, Advance(), result.spans[-1].end)  # type: ignore[arg-type]
    return meter


def test_meter_reads_occupancy_overruns_and_overhead_from_spans() -> None:
    first = Result(stream=0, spans=[span(0, 0.0, 1.0), span(1, 1.3, 2.3, computed=1.5)])
    second = Result(stream=1, spans=[span(0, 2.5, 3.5), span(1, 3.7, 4.0, rows=0)])
    meter = watched([first, second], [0.0, 2.4])
    assert meter.stage_busy == pytest.approx([2.0 / 4.0, 1.3 / 4.0])
    assert meter.overruns == (1, 3), "batches without rows are only passed on"
    link = LinkTiming(latency_s=0.05, bytes_per_s=100.0, row_bytes=5.0)
    assert meter.overhead_per_hop([link] * 3) == pytest.approx(0.2)
    assert meter.overhead_per_loop() == pytest.approx(0.1)
    assert (meter.rows_computed, meter.rows_cancelled) == (1, 1)
    assert meter.stage_seconds == pytest.approx(1.0)


def test_a_hop_that_had_to_queue_is_no_overhead() -> None:
    first = Result(stream=0, spans=[span(0, 0.0, 1.0), span(1, 1.0, 4.0)])
    second = Result(stream=1, spans=[span(0, 1.0, 2.0), span(1, 4.0, 7.0)])
    assert watched([first, second], [0.0, 1.0]).overhead_per_hop(None) == pytest.approx(0.0)


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n")
    return path


def test_prompts_are_read_in_both_layouts(tmp_path: Path) -> None:
    file = write(tmp_path / "p.jsonl", json.dumps({"prompt": "a"}), "", json.dumps({"turns": ["b", "c"]}), "broken")
    assert read_prompts(file, 2) == ["a", "b"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 2: is not JSON"),
        ("[]", "line 2: is not an object"),
        ("{}", "line 2: needs a field"),
        ('{"turns": []}', "line 2"),
    ],
)
def test_a_bad_prompt_file_is_refused_by_line(tmp_path: Path, line: str, words: str) -> None:
    file = write(tmp_path / "p.jsonl", json.dumps({"prompt": "a"}), line)
    with pytest.raises(ConfigError, match=words):
        read_prompts(file, 9)


def test_missing_and_empty_prompt_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_prompts(tmp_path / "none.jsonl", 1)
    with pytest.raises(ConfigError, match="holds no prompt"):
        read_prompts(write(tmp_path / "p.jsonl", ""), 1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"strategies": ()}, "strategies"),
        ({"strategies": ("pipedec", "pipedec")}, "strategies"),
        ({"strategies": ("pipedec",), "num_prompts": 0}, "num_prompts"),
        ({"strategies": ("pipedec",), "max_tokens": 1}, "max_tokens"),
    ],
)
def test_bad_options_are_refused_by_name(options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        BenchOptions(**options)  # type: ignore[arg-type]


def test_one_table_serves_all_strategies_and_an_option_must_belong_to_one() -> None:
    options = BenchOptions(strategies=("autoregressive", "pipedec"), speculative_config={"width": 8})
    plain, pipedec = named_strategies(options)
    assert plain == ("autoregressive", None)
    assert pipedec[1] is not None
    assert pipedec[1].width == 8
    with pytest.raises(ConfigError, match="tree_size"):
        named_strategies(BenchOptions(strategies=("pipedec",), speculative_config={"tree_size": 8}))
    with pytest.raises(ConfigError, match="pipedex"):
        named_strategies(BenchOptions(strategies=("pipedex",)))


def a_run(strategy: str, speed: float, **other: object) -> StrategyRun:
    fields: dict[str, object] = {
        "strategy": strategy,
        "tokens": 10,
        "seconds": 10 / speed,
        "tokens_per_second": speed,
        "tokens_per_stage_time": 0.5,
        "mean_acceptance_length": 2.0,
        "stage_busy": [0.5],
        "rows_computed": 1,
        "rows_cancelled": 0,
        "looping_outputs": 0,
        "overrun_fraction": 0.0,
        "overhead_per_hop_ms": 0.1,
        "overhead_per_loop_ms": 0.1,
        "identical_to_autoregressive": True,
        "emulated": True,
        "synthetic": False,
    }
    return StrategyRun(**{**fields, **other})  # type: ignore[arg-type]


def test_tables_give_speedups_over_plain_and_say_what_is_emulated_or_synthetic() -> None:
    runs = [a_run("autoregressive", 2.0), a_run("pipedec", 9.0, synthetic=True)]
    gained, _ = tables_of(runs)
    assert list(gained.columns[2].cells) == ["1.00x", "4.50x"]
    assert gained.title == "emulated, synthetic drafter"


def test_a_figure_with_too_many_overruns_is_not_valid() -> None:
    assert not a_run("pipedec", 9.0, overrun_fraction=0.06).as_dict()["valid"]
    assert a_run("pipedec", 9.0, overrun_fraction=0.05).as_dict()["valid"]
    assert "outputs" not in a_run("pipedec", 9.0).as_dict()
