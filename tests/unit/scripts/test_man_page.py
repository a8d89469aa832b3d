"""docs/reference/penstock.1 is what its script writes, and leaves out no command and no option."""

from __future__ import annotations

import re

import pytest

from penstock.cli.app import COMMANDS
from scripts import man_page
from tests.unit.cli.invoke import invoke


def test_the_page_is_what_the_script_writes() -> None:
    assert man_page.PAGE.read_text(encoding="utf-8") == man_page.page(), "run python scripts/man_page.py"


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_has_all_its_options(name: str) -> None:
    part = man_page.page().replace("\\-", "-").split(f".SS penstock {name}\n")[1].split(".SS")[0]
    shown = set(re.findall(r"--[a-z][a-z-]+", invoke(name, "--help", width=300).stdout)) - {"--help"}
    assert shown <= set(re.findall(r"--[a-z][a-z-]+", part))


@pytest.mark.parametrize(("text", "escaped"), [("a-b", "a\\-b"), (".TH x", "\\&.TH x"), ("a\\b\n'c", "a\\eb\n\\&'c")])
def test_nothing_in_a_text_is_a_request_to_troff(text: str, escaped: str) -> None:
    assert man_page.roff(text) == escaped
