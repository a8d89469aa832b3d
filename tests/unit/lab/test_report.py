"""Tables, remarks, JSON and the plot."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from penstock.clients.api import Chunk, Usage
from penstock.lab.serving import Found, remarks, report_of, tables_of, write_plot
from penstock.lab.serving_load import Level, Outcome, summarize
from tests.unit.lab.outcomes import answered, failed, level
from tests.unit.lab.png import png_size


def shown(levels: Sequence[Level], **goodput: float) -> str:
    out = Console(file=io.StringIO(), width=160)
    for table in tables_of(levels, [summarize(one, goodput) for one in levels]):
        out.print(table)
    assert isinstance(out.file, io.StringIO)
    return out.file.getvalue()


def said(levels: Sequence[Level], repeated: int | None = None) -> str:
    return "\n".join(remarks(levels, [summarize(one, {}) for one in levels], repeated))


def test_a_row_for_each_concurrency() -> None:
    text = shown([level(answered(), concurrency=1), level(failed(), concurrency=8)])
    assert "1000.0" in text
    rows = [line.split() for line in text.splitlines() if line.strip().startswith(("1 ", "8 "))]
    assert [row[:3] for row in rows[:2]] == [["1", "1", "0"], ["8", "0", "1"]]
    assert "within" not in text
    assert "Speculation" not in text


def test_no_limit_goodput_and_speculation() -> None:
    text = shown([level(answered(usage=Usage(10, 5, accepted=3, rejected=1)), concurrency=None)], ttft=1000.0)
    assert "no limit" in text
    assert "within" in text
    assert "75%" in text.split("Speculation")[1]


def test_remarks_say_what_speaks_against_the_figures() -> None:
    first = level(answered(usage=None), failed(1), failed(2, "ReadTimeout"), concurrency=1, asked=5)
    second = level(answered(usage=Usage(10, 5, cached_tokens=8), text="y"), concurrency=2)
    text = said([first, second], repeated=4)
    assert "1 failed with HTTP 429, for example: HTTP 429: too many" in text
    assert "1 failed with ReadTimeout" in text
    assert "2 of 5 requests had not ended" in text
    assert "replies without usage, whose tokens are not counted: 1." in text
    assert "4 different prompts only" in text
    assert "prefix cache" in text
    assert "Concurrency 2: 0 of 1 texts are the same as at concurrency 1." in text


def test_empty_answers_are_explained() -> None:
    empty = Outcome(0, 0.0)
    empty.add(Chunk(finish_reason="stop"), 1.0)
    assert "1 of 2 answers are empty: the model's first token was an end token" in said([level(empty, answered(1))])


def test_a_clean_run_has_nothing_to_excuse() -> None:
    assert len(said([level(answered())]).splitlines()) == 1


def test_json_has_figures_and_requests() -> None:
    levels = [level(answered(1, started=2.0), failed(0))]
    found = report_of({"seed": 0}, Found(levels=levels), [summarize(one, {}) for one in levels]).document
    run = found["runs"][0]
    assert (found["settings"], run["completed"], run["mean_ttft_ms"]) == ({"seed": 0}, 1, 1000.0)
    assert [request["index"] for request in run["requests"]] == [0, 1]
    assert (run["requests"][1]["started"], run["requests"][1]["usage"]["completion_tokens"]) == (2.0, 5)
    assert run["requests"][0]["error"] == "HTTP 429"


def test_the_plot_is_a_picture_also_where_a_level_failed(tmp_path: Path) -> None:
    levels = [level(answered(), concurrency=1), level(failed(), concurrency=2), level(answered(), concurrency=16)]
    write_plot(tmp_path / "a.png", "title", [summarize(one, {}) for one in levels])
    assert png_size(tmp_path / "a.png") == (1320, 480)
