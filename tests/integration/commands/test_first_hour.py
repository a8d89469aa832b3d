"""The commands of tests/first_hour.md print what the page says; tests/unit/test_docs.py checks that none is missing.

``penstock`` is a fork of a process that has imported what commands need (``tests/warm.py``).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.first_hour import BLOCKS, PAGES, ROOT, Typed
from tests.real_model import smollm2
from tests.warm import lend, write_command

NEEDING: Final = ("smollm2", "Germany")
"""Words of commands that need the default model."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("first-hour")
    (made / "docs").symlink_to(ROOT / "docs")
    return made


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A home of its own, with this user's caches."""
    place = tmp_path_factory.mktemp("typing")
    (place / "home").mkdir()
    (place / "bin").mkdir()
    write_command(place / "bin" / "penstock")
    lend(place / "home")
    return {
        "XDG_CACHE_HOME": str(Path.home() / ".cache"),
        **os.environ,
        "HOME": str(place / "home"),
        "PATH": f"{place / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
    }


@pytest.mark.processes
@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block[0].command[:40])
def test_what_is_typed_prints_what_stands_there(block: list[Typed], folder: Path, environment: dict[str, str]) -> None:
    if any(word in one.command for one in block for word in NEEDING):
        smollm2()
    mark = "---- next ----"
    script = f"\necho '{mark}'\n".join(one.command for one in block)
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    for one, printed in zip(block, done.stdout.split(f"{mark}\n"), strict=True):
        assert as_expected(one.expected, printed), f"$ {one.command}\n{printed}"


def as_expected(expected: str, printed: str) -> bool:
    """Every expected line is printed, in this order; where ``...`` ends one, anything may follow."""
    pattern = r"[\s\S]*".join(re.escape(part) for part in re.split(r"\.{3}\n?", expected.strip()))
    return re.fullmatch(rf"\s*{pattern}\s*", printed) is not None and (not expected or bool(printed.strip()))


@pytest.mark.parametrize(
    ("expected", "printed", "fits"),
    [
        ("penstock ...\n", "penstock 0.1.0\n", True),
        ("...Paris...\n", "It is\nParis.\n", True),
        ("...Paris...\n", "It is Lyon.\n", False),
        ("one...\n...two...\n", "one 1\nand two 2\n", True),
        ("...two...\n...one...\n", "one 1\ntwo 2\n", False),
        ("...\n", "", False),
        ("", "", True),
        ("", "unasked", False),
        ("stopped\n", "stopped now\n", False),
    ],
)
def test_what_counts_as_expected(expected: str, printed: str, fits: bool) -> None:
    assert as_expected(expected, printed) is fits


@pytest.mark.processes
@pytest.mark.parametrize(
    "page", [page for page in PAGES if "```python" in page.read_text()], ids=lambda page: page.name
)
def test_the_python_examples_run_with_the_demo_pair(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    example = re.sub(r'"(?:path/to/\w+|smollm2)"', '"demo"', example)
    exec(compile(re.sub(r"max_tokens=\d+", "max_tokens=16", example), str(page), "exec"), {})
    assert capsys.readouterr().out.strip()
