"""Verdicts on the papers' findings follow the figures; pages written by hand have theirs from the stored ones."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import results
from benchmarks.sections import base, findings, reaches
from benchmarks.sections.findings import verdicts
from benchmarks.sections.findings.verdicts import (
    FAILS,
    HOLDS,
    LESS,
    OPEN,
    OTHER,
    PARTLY,
    of_all,
    of_cases,
    of_every,
    of_ratio,
    of_sizes,
)
from penstock.lab.report import Ratio

FOUND = findings.findings()


@pytest.mark.parametrize(
    ("low", "high", "stated", "verdict"),
    [
        (1.3, 1.6, 1.5, HOLDS),
        (1.3, 1.4, 1.5, LESS),
        (0.9, 1.4, 1.5, OPEN),
        (0.9, 1.0, 1.5, OPEN),
        (0.8, 0.9, 1.5, FAILS),
        (1.1, 1.2, 1.0, HOLDS),
    ],
)
def test_bounds_decide(low: float, high: float, stated: float, verdict: str) -> None:
    assert of_ratio(Ratio((low * high) ** 0.5, low, high, 8), stated) == verdict


def test_a_ratio_without_bounds_decides_by_its_mean() -> None:
    assert of_ratio(Ratio(1.2, None, None, 1)) == HOLDS
    assert of_ratio(Ratio(0.9, None, None, 1)) == FAILS


@given(st.lists(st.sampled_from([HOLDS, LESS, OPEN, FAILS]), min_size=1))
def test_settings_that_agree_have_their_verdict_and_a_finding_holds_in_part_where_it_holds_in_some(
    found: list[str],
) -> None:
    verdict, kinds = of_all(found), set(found)
    assert (verdict == PARTLY) == bool(kinds & {HOLDS, LESS} and kinds & {OPEN, FAILS})
    assert (verdict == FAILS) == (FAILS in kinds <= {OPEN, FAILS})
    assert verdict in (PARTLY, LESS, FAILS, found[0])


@given(st.lists(st.sampled_from([HOLDS, LESS, OPEN, FAILS]), min_size=1))
def test_a_finding_that_needs_every_comparison_fails_with_one_and_is_open_with_one(found: list[str]) -> None:
    verdict = of_every(found)
    assert (verdict == FAILS) == (FAILS in found)
    assert (verdict == OPEN) == (OPEN in found and FAILS not in found)
    assert verdict != PARTLY


@given(st.lists(st.booleans(), min_size=1))
def test_cases_hold_all_in_part_or_not(cases: list[bool]) -> None:
    assert of_cases(cases) == {True: HOLDS, False: FAILS}.get(cases[0] if len(set(cases)) == 1 else None, PARTLY)


@pytest.mark.parametrize(
    ("cases", "ours", "stated", "verdict"),
    [
        ([True, True], [0.92, 0.67], [0.55, 0.40], LESS),
        ([True, True], [0.92, 0.30], [0.55, 0.40], HOLDS),
        ([True], [1.31], [4.42], LESS),
        ([True], [2.28], [1.8], HOLDS),
        ([True, False], [1.1, 0.9], [1.4, 1.8], PARTLY),
        ([False], [0.9], [1.4], FAILS),
    ],
)
def test_a_size_without_bounds_is_smaller_where_all_of_ours_are(
    cases: list[bool], ours: list[float], stated: list[float], verdict: str
) -> None:
    assert of_sizes(cases, ours, stated) == verdict


def test_every_finding_is_complete_and_says_why_it_is_not_comparable() -> None:
    for one in FOUND:
        assert all((one.place, one.claim, one.stated, one.ours, one.how)), one
        assert one.verdict in verdicts.VERDICTS
        assert one.verdict != OTHER or not one.how.startswith(("simulated", "in virtual time")), (
            "the reason comes first"
        )


def sizes(text: str) -> Iterator[tuple[float, float]]:
    """Each ratio's least and most: ``1.33 to 1.76x``, ``6.17x (4.46 to 7.79)`` or ``1.07x``."""
    for low, mean, least, most in re.findall(r"(?:([\d.]+) to )?([\d.]+)x(?: \(([\d.]+) to ([\d.]+)\))?", text):
        yield float(least or low or mean), float(most or mean)


def test_no_finding_holds_as_it_is_whose_bounds_are_below_the_papers_size() -> None:
    compared = 0
    for one in FOUND:
        stated = [least for least, _ in sizes(one.stated)]
        if one.verdict == HOLDS and stated and min(stated) > 1:
            compared += 1
            assert all(most > min(stated) - 0.01 for _, most in sizes(one.ours)), one
    assert compared > 10


def test_the_page_lists_each_finding_once_and_the_papers_page_each_by_its_paper() -> None:
    pages = results.pages()
    listed, papers = (pages[path] for path in (results.FINDINGS, results.PAPERS))
    rows = [line for line in listed.splitlines() if re.match(rf"\| ({'|'.join(findings.BY_PAPER)}) \|", line)]
    assert len(rows) == len(FOUND)
    assert papers.count("| **") == len(FOUND)


def test_no_figure_of_ours_is_typed_into_the_papers_page() -> None:
    source = (base.FOLDER / "papers.md.jinja").read_text(encoding="utf-8")
    by_hand = re.sub(r"\{\{.*?\}\}|\{%.*?%\}", "", source, flags=re.DOTALL)
    typed = set(re.findall(r"\d[\d.,]*(?:x\b|%| times\b| ms\b)", by_hand))
    of_papers, settings = {"1.77x", "1.73x", "1.17x", "0.23%"}, {"90%", "95%"}
    assert typed == of_papers | settings, "take it from what is stored, in benchmarks/sections/papers.py"


def test_a_figure_measured_anew_changes_the_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    """EAGLE-3 with more accepted tokens than EAGLE would be what the vLLM report has."""
    table = verdicts.figures_of("pp_eagle_table")
    for row in table.values():
        if row["method"] == "eagle3":
            for one in row["entries"].values():
                one["AR"] = 0.65
    stored = verdicts.figures_of
    monkeypatch.setattr(
        "benchmarks.sections.findings.vllm.figures_of", lambda name: table if name == "pp_eagle_table" else stored(name)
    )
    (before, after) = (
        next(one.verdict for one in some if one.claim == "EAGLE-3 accepts more than EAGLE")
        for some in (FOUND, findings.of_paper("vLLM report"))
    )
    assert (before, after) == (FAILS, HOLDS)


def test_figures_stand_between_their_two_comments_and_nowhere_else() -> None:
    page = f"before\n{reaches.BEGIN}\nold\n{reaches.END}\nafter"
    once = reaches.between(page, "new")
    assert once == f"before\n{reaches.BEGIN}\n\nnew\n\n{reaches.END}\nafter"
    assert reaches.between(once, "new") == once
    for wrong in ("no comments", page.replace(reaches.END, ""), page + reaches.BEGIN):
        with pytest.raises(ValueError, match="once each"):
            reaches.between(wrong, "new")
