"""No command loses a file of the user's, or finds out at its end that a file cannot be written."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest

from penstock.config import OUTPUT
from scripts.cli_docs import is_argument
from tests.unit.cli.invoke import invoke
from tests.unit.cli.paths import BESIDE, ENDINGS, OPTIONS

WRITTEN: Final = [
    (words, one)
    for words, one in OPTIONS
    if getattr(one, "rich_help_panel", "") == OUTPUT and any(word in str(one.metavar) for word in ("FILE", "DIR"))
]
FILES: Final = [(words, one) for words, one in WRITTEN if "FILE" in str(one.metavar)]
PAIRS: Final = [
    (words, one, other) for words, one in WRITTEN for command, other in OPTIONS if command == words and other is not one
]


def given(words: str, option: Any, path: Path) -> tuple[str, ...]:
    """The words that give the path to this option, or to all arguments of the command."""
    arguments = [one for command, one in OPTIONS if command == words and is_argument(one)]
    return (str(path),) * len(arguments) if is_argument(option) else (option.opts[0], str(path))


def test_the_walk_finds_all_files_that_are_written() -> None:
    assert {(words, one.name) for words, one in WRITTEN} >= {
        *(("bench", name) for name in ("json", "record", "report")),
        *(("bench quality", name) for name in ("json", "answers")),
        *(("bench serve", name) for name in ("json", "plot")),
        *(("generate", "trace"), ("plan", "output"), ("simulate", "json"), ("train", "output")),
    }


@pytest.mark.parametrize(
    ("words", "option", "other"), PAIRS, ids=[f"{words}-{one.name}-{other.name}" for words, one, other in PAIRS]
)
def test_what_another_option_names_is_not_written(words: str, option: Any, other: Any, tmp_path: Path) -> None:
    own = tmp_path / f"own{ENDINGS.get(other.name, '')}"
    own.write_text("keep")
    (link := tmp_path / f"link{ENDINGS.get(other.name, '')}").symlink_to(own)
    beside = () if is_argument(other) else BESIDE.get(words, ())
    result = invoke(*words.split(), *beside, *given(words, other, own), *given(words, option, link))
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1), result.output
    assert "names, too" in result.stderr
    assert {option.name, other.name} <= set(result.stderr.replace(",", " ").split())
    assert own.read_text() == "keep"


@pytest.mark.parametrize(("words", "option"), FILES, ids=[f"{words}-{one.name}" for words, one in FILES])
@pytest.mark.parametrize("place", ["nowhere/file", "", "link", "/proc/file"])
def test_a_file_that_cannot_be_written_is_refused_at_once(words: str, option: Any, place: str, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("nowhere/file")
    file = tmp_path / place
    result = invoke(*words.split(), *BESIDE.get(words, ()), *given(words, option, file))
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1), result.output
    assert result.stderr.startswith(f"penstock: error: {option.name} is '{file}'")
    assert [one.name for one in tmp_path.iterdir()] == ["link"]


@pytest.mark.parametrize("wrong", [("--max-tokens", "0"), ("--model", "nowhere/model"), ("--strategy", "nonsense")])
def test_a_trace_is_not_begun_by_a_command_that_is_refused(wrong: tuple[str, ...], tmp_path: Path) -> None:
    (old := tmp_path / "old").write_text("keep")
    for file in (old, tmp_path / "new"):
        assert invoke("generate", "x", "--model", "demo", *wrong, "--trace", str(file)).exit_code in (1, 2)
    assert [(one.name, one.read_text()) for one in tmp_path.iterdir()] == [("old", "keep")]


def test_a_full_disk_is_named() -> None:
    result = invoke("simulate", "--cluster", "demo", "--tokens", "100", "--json", "/dev/full")
    assert (result.exit_code, result.stderr.splitlines()[-1]) == (
        1,
        "penstock: error: /dev/full: No space left on device; free some space there",
    )
