"""The pages of results are what benchmarks/results.py makes of the stored figures; each has its commands."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from benchmarks import results
from benchmarks.sections import base
from benchmarks.sections.base import wrapped
from benchmarks.sections.headlines import wrong
from benchmarks.shared import measured
from benchmarks.shared.measured import store, stored
from benchmarks.strategies import auto_against
from penstock.core import ConfigError


@pytest.fixture
def empty(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder for figures, with none in it."""
    monkeypatch.setattr(measured, "MEASURED", tmp_path)
    return tmp_path


def test_the_pages_are_what_the_stored_figures_give() -> None:
    pages = results.pages()
    behind = [path.name for path, text in pages.items() if path.read_text(encoding="utf-8") != text]
    assert behind == [], "run python -m benchmarks.results"
    assert set(results.FOLDER.iterdir()) == {page for page in pages if page.parent == results.FOLDER}


def test_every_section_is_in_one_page_and_every_link_leads_to_one() -> None:
    names = [name for page in results.PAGES for name in results.TITLES[page.name]]
    assert len(set(names)) == len(names)
    for page in results.PAGES:
        assert page.measured.keys() <= results.TITLES[page.name].keys(), "what is declared has a block"
    for path, text in results.pages().items():
        if path.parent != results.FOLDER and path != results.FIRST:
            continue  # which has no contents of its own
        headings = [results.anchor(title) for title in re.findall(r"^## (.+)$", text, re.MULTILINE)]
        assert len(set(headings)) == len(headings)
        if path != results.FIRST:
            assert sorted(set(re.findall(r"\]\(#([^)]+)\)", text))) == sorted(headings)


def test_the_first_page_has_a_figure_from_every_section_that_it_names() -> None:
    source = (base.FOLDER / "results.md.jinja").read_text(encoding="utf-8")
    named = re.findall(r'row\("(\w+)"\)', source)
    assert named
    page = results.first_page()
    for name in set(named) & set(results.shown()):
        assert f"#{results.anchor(results.title_of(name))})" in page


def test_a_section_that_is_not_measured_has_no_row_on_the_first_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "shown", lambda: ["overhead"])
    rows = [line for line in results.first_page().splitlines() if line.startswith("| ")]
    assert [row.split(" | ")[0] for row in rows[2:]] == [
        "| time that engine and messages add to a step of 10 ms: `auto`, 14 stages, a model of two layers, "
        "a drafter that is always right"
    ]


def test_what_went_wrong_is_on_the_first_page() -> None:
    assert wrong(["a token differed", "a hang"]) == "2 problems"


@pytest.mark.parametrize("name", results.shown())
def test_stored_figures_say_how_and_with_what_they_were_taken(name: str) -> None:
    measured = stored(name)
    assert results.KIND.match(measured.how)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", measured.date)
    assert measured.commands
    assert {"python", "penstock", "torch", "transformers"} <= set(measured.versions)


def test_what_is_stored_is_read_again(empty: Path) -> None:
    store("one", "Measured", (["penstock demo"], {"x": [1.5, None]}))
    found = stored("one")
    assert (found.how, found.commands, found.figures) == ("Measured", ["penstock demo"], {"x": [1.5, None]})


@pytest.mark.parametrize(
    ("content", "problem"),
    [(None, "cannot be read"), ("{", "is not JSON"), (json.dumps({"how": "", "commands": []}), "date is missing")],
)
def test_missing_or_damaged_figures_are_named_with_the_remedy(empty: Path, content: str | None, problem: str) -> None:
    path = empty / "costs" / "overhead.json"
    path.parent.mkdir()
    if content is not None:
        path.write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        stored("overhead")
    assert str(caught.value).startswith(f"{path}: ")
    assert problem in str(caught.value)
    assert "--measure overhead" in str(caught.value)


def test_a_section_that_is_none_is_refused_with_the_nearest_before_any_is_measured() -> None:
    with pytest.raises(ConfigError, match="'overhed' is no section; did you mean 'overhead'"):
        results.measure(["overhead", "overhed"])


def test_a_section_measured_by_hand_is_refused_with_its_commands() -> None:
    with pytest.raises(ConfigError, match=r"not measured from here but by:\n.*test_exactness"):
        results.measure(["overhead", "exactness"])


@pytest.mark.parametrize(
    "words",
    [
        ["penstock", "demo"],
        ["penstock", "bench", "--strategies", ",".join(f"pipedec[width={i}]" for i in range(30)), "--seed", "1"],
        [
            "penstock",
            "bench",
            *("--cluster demo " * 20).split(),
            "--speculative-config",
            '{"method": "ngram"}',
            "$x[y]",
        ],
    ],
)
def test_a_wrapped_command_is_still_that_command(words: list[str]) -> None:
    lines = wrapped(shlex.join(words))
    assert shlex.split("\n".join(lines).replace("\\\n", "")) == words  # as a shell joins lines
    assert all(len(line) <= base.LINE or " " not in line.strip(" \\") for line in lines)


def test_a_cluster_that_is_stored_with_as_many_requests_is_not_run_again(empty: Path) -> None:
    every = list(auto_against.SETTINGS)
    assert auto_against.left(6, ["demo", "spd-4"], again=False) == {"demo": every, "spd-4": every}
    figures = {"demo": {"requests": 6, "papers": "flowspec"}, "spd-4": {"requests": 2}}
    store(auto_against.NAME, auto_against.HOW, (["..."], figures))
    names = ["demo", "spd-4", "spd-8"]
    assert auto_against.left(6, names, again=False) == {"spd-4": every, "spd-8": every}
    assert auto_against.left(6, names, again=True) == {"demo": ["autoregressive", "flowspec", "continuous", "auto"]}
