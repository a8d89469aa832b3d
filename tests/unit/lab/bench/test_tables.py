"""Tables and what has to be said beside them."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from penstock.lab.bench.comparison import SmallModel
from penstock.lab.bench.report import COST, DRAFTS, SPEED, headlines, hit_rate, markdown_of, remarks, tables_of
from penstock.lab.report import markdown
from tests.unit.lab.bench.runs import a_run

PLAIN = a_run("autoregressive", 2.0, wall_clock_speedup=1.0, theoretical_speedup=1.0, efficiency=1.0)
SWEPT = a_run(
    "pipedec[width=4]",
    9.0,
    synthetic=True,
    wall_clock_speedup=4.5,
    wall_clock_speedup_interval=[4.1, 4.9],
    equivalent_acceptance_length=7.5,
    theoretical_speedup=6.0,
    efficiency=0.75,
    draft_acceptance_rate=0.125,
    decided_by_depth=[8, 4],
    hit_by_depth=[6, 1],
)
SMALL = SmallModel("chat", 0.0, 30.0, modelled=True)


def test_figures_stand_under_their_headings() -> None:
    speed, drafts, cost = tables_of([PLAIN, SWEPT], [SMALL])
    assert [str(column.header) for column in speed.columns] == ["strategy", *SPEED]
    assert list(speed.columns[0].cells)[1] == r"pipedec\[width=4]", "brackets are no markup"
    assert list(speed.columns[2].cells) == ["1.00x", "4.50x", "15.00x"]
    assert list(speed.columns[3].cells) == ["-", "4.10-4.90", "-"]
    assert list(speed.columns[5].cells) == ["100%", "75%", "-"]
    assert list(drafts.columns[3].cells) == ["-", "12%"]
    assert list(drafts.columns[4].cells) == ["-", "75%"]
    assert list(drafts.columns[6].cells) == ["-", "7.50"]
    assert len(cost.columns) == 1 + len(COST)
    assert str(speed.title) == "chat, T = 0, emulated, synthetic drafter"


def test_a_sentence_comes_first() -> None:
    differing = a_run("pipedec", 9.0, wall_clock_speedup=3.97, identical_to_autoregressive=False)
    assert headlines([PLAIN, SWEPT, differing]) == [
        "pipedec[width=4]: 4.50 times as fast as plain, all texts identical",
        "pipedec: 3.97 times as fast as plain, but NOT all texts identical",
    ]
    slow = a_run("auto", 9.0, temperature=1.0, wall_clock_speedup=0.5, overrun_fraction=0.06)
    assert headlines([PLAIN, slow]) == [
        "auto (chat, T = 1): 0.50 times as fast as plain, all texts identical; NOT VALID, see below"
    ]


@pytest.mark.parametrize("width", [36, 60, 80])
def test_the_narrowest_terminal_shows_whether_texts_are_identical(width: int) -> None:
    console = Console(file=io.StringIO(), width=width)
    console.print(tables_of([PLAIN, SWEPT])[0])
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert "identical" in shown.split("Not shown")[0]
    assert shown.split("Not shown")[0].count("yes") == 2


def test_each_setting_has_its_own_tables() -> None:
    warm = a_run("autoregressive", 2.0, temperature=1.0)
    tables = tables_of([PLAIN, warm], [SMALL])
    assert [str(table.title) for table in tables[::3]] == ["chat, T = 0, emulated", "chat, T = 1, emulated"]
    assert [table.row_count for table in tables[::3]] == [2, 1], "the small model ran in the first setting only"


def test_columns_of_figures_are_aligned_right() -> None:
    rows = [["`auto`", "1.5x (1.2 to 1.8)", "`ngram`", "-", "NA"], ["plain", "**2**", "", "alpaca", "3"]]
    assert (
        markdown(["name", "speed", "drafts", "set", "AR"], rows).splitlines()[1] == "| --- | ---: | --- | --- | ---: |"
    )


def test_the_markdown_has_all_columns_and_the_small_model() -> None:
    lines = markdown_of([PLAIN, SWEPT], [SMALL]).splitlines()
    widths = {line.count("|") for line in lines}
    assert widths == {2 + len(SPEED) + len(DRAFTS) + len(COST)}
    assert "| efficiency |" in lines[0]
    assert lines[3].startswith("| `pipedec[width=4]` | 9.00 | 4.50x | 4.10-4.90 |")
    assert lines[4].startswith("| small model alone | 30.00 | 15.00x | - |")


def test_hit_rate_is_the_first_layers() -> None:
    assert hit_rate(SWEPT) == 0.75
    assert hit_rate(PLAIN) is None


def test_what_a_reader_has_to_know_is_said() -> None:
    slow = a_run("pipedec", 9.0, overrun_fraction=0.06)
    looping = a_run("pipedec", 9.0, temperature=1.0, looping_outputs=1)
    said = " ".join(remarks([PLAIN, SWEPT, slow, looping], [SMALL]))
    for words in (
        "Emulated: real tokens",
        "Synthetic drafter",
        "decoding plainly: modelled",
        "Student's t",
        "NOT VALID: chat, T = 0, pipedec had 6.0% overruns",
        "chat, T = 1: 1 of 2 outputs fall into a loop",
    ):
        assert words in said
    (warm_up,) = remarks([a_run("autoregressive", 2.0, emulated=False)])
    assert "a request of 4 tokens to warm up, which does not count" in warm_up


def test_a_figure_with_too_many_overruns_is_not_valid() -> None:
    assert not a_run("pipedec", 9.0, overrun_fraction=0.06).as_dict()["valid"]
    assert a_run("pipedec", 9.0, overrun_fraction=0.05).as_dict()["valid"]
    assert not {"outputs", "timeline"} & a_run("pipedec", 9.0).as_dict().keys()
