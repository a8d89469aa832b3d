"""The bench's arithmetic, its prompt files and its refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.cluster.timing import LinkTiming
from penstock.core import ConfigError
from penstock.engine.scheduler import Advance
from penstock.lab.bench.command import BenchPlan, all_settings, engine_options, placed, plan_of, seeds_remark
from penstock.lab.bench.meter import Meter
from penstock.lab.grid import DEFAULT_PROMPTS, BenchOptions, Question, read_prompt_sets, read_prompts, read_turns
from penstock.lab.report import is_looping, prepare
from penstock.messages import Batch, Result, Rows, Span
from penstock.strategies.auto import Continuous
from penstock.strategies.base import Autoregressive
from penstock.strategies.pipedec import PipeDecOptions
from tests.unit.lab.bench.runs import a_run, one_request


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


def test_a_batch_that_waited_for_more_than_the_loop_is_no_overhead_of_it() -> None:
    """Paced batches are held for the slowest stage; here nothing but the stages takes any time."""
    held, plain = Continuous(4, 3), Autoregressive()
    for strategy in (held, plain):
        meter, _, _ = one_request(4, strategy, [0.8, 0.9, 0.95], tokens=60)
        assert len(meter._turnarounds) > 5
        assert set(meter._turnarounds) == {0.0}


def test_a_hop_that_had_to_queue_is_no_overhead() -> None:
    first = Result(stream=0, spans=[span(0, 0.0, 1.0), span(1, 1.0, 4.0)])
    second = Result(stream=1, spans=[span(0, 1.0, 2.0), span(1, 4.0, 7.0)])
    assert watched([first, second], [0.0, 1.0]).overhead_per_hop(None) == pytest.approx(0.0)


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n")
    return path


def test_prompts_are_read_in_both_layouts(tmp_path: Path) -> None:
    file = write(tmp_path / "p.jsonl", json.dumps({"prompt": "a"}), "", json.dumps({"turns": ["b", "c"]}), "broken")
    assert read_turns(file, 2) == [("a",), ("b", "c")]
    assert read_prompts(file, 2) == ["a", "b"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 2: is not JSON"),
        ("[]", "line 2: is not an object"),
        ("{}", "line 2: needs a field"),
        ('{"turns": []}', "line 2"),
        ('{"turns": ["a", 1]}', "line 2"),
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


def test_two_files_of_one_name_are_refused_and_lines_are_named_per_file(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    one = write(tmp_path / "chat.jsonl", json.dumps({"prompt": "a"}))
    same = write(tmp_path / "a" / "chat.jsonl", json.dumps({"prompt": "b"}))
    code = write(tmp_path / "code.jsonl", json.dumps({"turns": ["c"]}), json.dumps({"turn": "d"}))
    assert read_prompt_sets([one, code], 1) == {"chat": [("a",)], "code": [("c",)]}
    with pytest.raises(ConfigError, match="would both be called 'chat'; rename one"):
        read_prompt_sets([one, same], 1)
    with pytest.raises(ConfigError, match=r"code\.jsonl, line 2: needs a field 'prompt'"):
        read_prompt_sets([one, code], 2)


def openings(plan: BenchPlan) -> list[Question]:
    return [one.opening for one in plan.conversations]


def test_one_table_serves_all_strategies_and_plain_decoding_is_added() -> None:
    shared = {"method": "ngram", "width": 8}
    plan = plan_of(BenchOptions(strategies=("pipedec[width=4]", "pipedec"), speculative_config=shared))
    assert plan.strategies[0] == ("autoregressive", None)
    widths = [config.strategy_options for _, config in plan.strategies if config]
    assert widths == [PipeDecOptions(width=4), PipeDecOptions(width=8)]
    assert plan.drafting is plan.strategies[2][1], "the widest, which needs the most slots"
    assert len(plan.conversations) == 4
    assert plan.total(openings(plan)) == 12, "prompt lookup needs no small model"


@pytest.mark.parametrize(
    ("cluster", "method", "expected"),
    [("demo", "draft_model", 0), ("local-2", "draft_model", 8), (None, "draft_model", 8), ("local-2", "ngram", 0)],
)
def test_a_draft_model_on_this_host_is_measured_alone_once_per_prompt(
    cluster: str | None, method: str, expected: int
) -> None:
    table = {"method": method, **({"model": "demo"} if method == "draft_model" else {})}
    options = BenchOptions(
        strategies=("pipedec",), cluster=cluster, speculative_config=table, temperature=(0.0, 1.0), seeds=3
    )
    plan = plan_of(options)
    assert len(plan.conversations) == 4 * (1 + 3)
    assert plan.total(openings(plan)) == 2 * len(plan.conversations) + expected


def test_seeds_that_change_nothing_are_not_run_and_it_is_said() -> None:
    options = BenchOptions(strategies=("pipedec",), temperature=(0.0, 1.0), seeds=3)
    (said,) = seeds_remark(options, plan_of(options))
    assert "one seed was run, not 3" in said
    synthetic = {"method": "synthetic", "accuracy": [0.5]}
    drawn = BenchOptions(strategies=("pipedec",), temperature=(0.0,), seeds=3, speculative_config=synthetic)
    assert seeds_remark(drawn, plan_of(drawn)) == []
    assert len(plan_of(drawn).conversations) == 4 * 3, "another seed has the synthetic drafter err elsewhere"
    sampled = BenchOptions(strategies=("pipedec",), temperature=(1.0,), seeds=3)
    assert seeds_remark(sampled, plan_of(sampled)) == []


def test_settings_name_files_and_no_folders(tmp_path: Path) -> None:
    options = BenchOptions(
        strategies=("pipedec",),
        prompts=(DEFAULT_PROMPTS, tmp_path / "chat.jsonl"),
        json=tmp_path / "out.json",
        report=tmp_path,
    )
    settings = all_settings(options, 2)
    assert settings["prompts"] == ["package", "chat.jsonl"]
    assert str(tmp_path) not in json.dumps(settings)
    assert set(settings["versions"]) == {"penstock", "torch", "transformers"}


def test_a_report_that_cannot_be_written_is_refused_beforehand(tmp_path: Path) -> None:
    file = write(tmp_path / "file", "")
    with pytest.raises(ConfigError, match=r"report: .* cannot be made"):
        prepare(file)
    prepare(tmp_path / "new" / "report")
    assert (tmp_path / "new" / "report").is_dir()


def test_a_bench_has_a_cluster_for_every_place_of_the_drafter() -> None:
    options = {"strategies": ("pipedec",), "speculative_config": {"method": "draft_model", "model": "demo"}}
    places = ("engine", "last-stage", "board-2")
    plan = plan_of(BenchOptions(**options, cluster="demo", drafter_on=places, num_prompts=2))
    found = {place: cluster and cluster.drafter for place, cluster in plan.clusters.items()}
    assert found == {"engine": "board-5", "last-stage": "board-4", "board-2": "board-2"}
    assert plan.total(openings(plan)) == 3 * 2 * 2
    with pytest.raises(ConfigError, match="drafter_on is 'board-9', which is no device"):
        plan_of(BenchOptions(**options, cluster="demo", drafter_on=("board-9",)))
    real = plan_of(BenchOptions(**options, drafter_on=("engine", "last-stage")))
    assert real.clusters == {"engine": None, "last-stage": None}  # the engine's own option says where
    assert engine_options(BenchOptions(**options), real, "last-stage").drafter_on == "last-stage"
    with pytest.raises(ConfigError, match="drafter_on means nothing where no device drafts"):
        plan_of(BenchOptions(strategies=("autoregressive",), cluster="demo", drafter_on=("engine",)))
    with pytest.raises(ConfigError, match="drafter_on is 'engine,engine'; it has to be different ones"):
        BenchOptions(**options, drafter_on=("engine", "engine"))


def test_entries_say_where_their_drafter_ran_and_plain_decoding_stands_once() -> None:
    runs = [
        run
        for place, first in (("engine", True), ("last-stage", False))
        for run in placed([a_run("autoregressive", 1.0), a_run("pipedec[width=4]", 2.0)], place, first=first)
    ]
    assert [run.strategy for run in runs] == [
        "autoregressive",
        "pipedec[width=4] @ engine",
        "pipedec[width=4] @ last-stage",
    ]


def test_the_meter_counts_features_that_were_sent_after_the_first_token() -> None:
    meter = Meter(2, None, [100.0, 50.0])
    for stream, submitted in ((0, 0.0), (1, 5.0)):
        meter.submitted(Batch(stream=stream, rows=Rows([0], [stream], [0], [0], [0], [0])), submitted)
        sent = Span(0, submitted, submitted, submitted + 1, 0.0, 1.0, rows=3, features=submitted + 2)
        kept = Span(1, submitted, submitted + 1, submitted + 2, 0.0, 1.0, rows=3)
        meter.arrived(Result(stream=stream, spans=[sent, kept]), submitted + 2)
        meter.advanced(None, Advance(), submitted + 2)  # type: ignore[arg-type]
    assert meter.feature_bytes == 300.0
