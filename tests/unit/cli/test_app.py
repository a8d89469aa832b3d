"""The program itself: its commands, help, version, and that none of it waits for torch."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest
from typer.testing import CliRunner

import penstock
from penstock.cli import app as module
from penstock.cli.app import COMMANDS
from tests.serving import PENSTOCK
from tests.unit.cli.invoke import invoke

HEAVY = ("torch", "transformers", "safetensors", "huggingface_hub", "fastapi", "matplotlib")


def test_every_command_has_its_app() -> None:
    folder = Path(module.__file__).parent
    apps = [
        re.findall(r"^(\w+)_app = new_app\(\)", file.read_text(encoding="utf-8"), re.M) for file in folder.glob("*.py")
    ]
    assert sorted(chain.from_iterable(apps)) == sorted(COMMANDS)


def test_help_lists_every_command() -> None:
    result = invoke("--help")
    assert result.exit_code == 0
    assert [name for name in COMMANDS if f" {name} " not in result.stdout] == []


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command_says_what_the_list_says(name: str) -> None:
    result = invoke(name, "--help")
    assert result.exit_code == 0
    shown = " ".join(result.stdout.split())
    assert f"penstock {name} [OPTIONS]" in shown or f"root {name} [OPTIONS]" in shown
    assert COMMANDS[name] in shown


def test_no_command_is_help() -> None:
    assert "Commands" in invoke().output


def test_an_unknown_command_is_refused() -> None:
    result = invoke("go")
    assert result.exit_code == 2
    assert "No such command 'go'" in result.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_a_mistyped_command_is_told_which_is_meant(name: str) -> None:
    assert f"'{name}'" in " ".join(invoke(name + name[-1]).stderr.split())


def test_help_version_and_errors_load_nothing_heavy() -> None:
    told = [["--version"], ["--help"], ["bench", "serve", "--help"], ["generate", "x", "--strategy", "no"]]
    told += [[name, "--help"] for name in COMMANDS]
    code = f"""
import sys
from penstock.cli.app import app
for arguments in {told!r}:
    try:
        app(arguments)
    except SystemExit:
        pass
    loaded = sorted(set({HEAVY!r}) & set(sys.modules))
    assert not loaded, (arguments, loaded)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.startswith(f"penstock {penstock.__version__}\n")


def test_the_list_of_commands_loads_none_of_them() -> None:
    code = """
import sys
from penstock.cli.app import app
try:
    app(["--help"])
except SystemExit:
    pass
assert "penstock.engine" not in sys.modules
assert "penstock.cli.run" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)


def test_a_launcher_can_start_the_module() -> None:
    result = subprocess.run([sys.executable, "-m", "penstock.cli", "--version"], capture_output=True, text=True)
    assert result.stdout == f"penstock {penstock.__version__}\n"


def test_names_of_options_are_whole_in_forty_columns() -> None:
    code = f"""
from contextlib import suppress
from penstock.cli.app import app
for name in {list(COMMANDS)!r}:
    with suppress(SystemExit):
        app([name, "--help"])
"""
    shown = {**os.environ, "COLUMNS": "40"}
    found = subprocess.run([sys.executable, "-c", code], env=shown, capture_output=True, text=True, check=True)
    assert found.stdout.count("Usage:") == len(COMMANDS)
    assert "\N{HORIZONTAL ELLIPSIS}" not in found.stdout


@pytest.mark.parametrize(
    ("typed", "found"),
    [
        ("generate --strategy f", ["flowspec"]),
        ("generate --model smollm2:3", ["smollm2:360m"]),
        ("serve dem", ["demo"]),
        ("run qwen3:1.7", ["qwen3:1.7b"]),
        ("serve --dtype b", ["bfloat16"]),
        ("serve --quantization int", ["int8", "int4"]),
        ("serve --numerics e", ["exact"]),
        ("bench --strategies auto,pi", ["auto,pipedec"]),
        ("simulate --cluster two", ["two-servers"]),
    ],
)
def test_values_are_completed(typed: str, found: list[str]) -> None:
    done = CliRunner().invoke(module.app, [], prog_name="penstock", env=as_bash_asks(typed))
    assert done.stdout.split() == found


def test_the_program_itself_completes_values() -> None:
    asked = {**os.environ, **as_bash_asks("generate --strategy f")}
    done = subprocess.run([PENSTOCK], env=asked, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["flowspec"]


def as_bash_asks(typed: str) -> dict[str, str]:
    """The environment by which bash asks for what may end the last word that is ``typed``."""
    words = f"penstock {typed}"
    return {"COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1), "_PENSTOCK_COMPLETE": "complete_bash"}


def test_the_manual_is_at_hand() -> None:
    result = invoke("help", "--man")
    assert result.exit_code == 0
    assert result.stdout.startswith(".TH PENSTOCK 1")


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command_is_its_help(name: str) -> None:
    shown = [" ".join(invoke(*words).stdout.split()) for words in (("help", name), (name, "--help"))]
    assert shown[0] == shown[1].replace("Usage: root", "Usage: penstock")


@pytest.mark.parametrize("words", [("hosts", "setup"), ("bench", "serve"), ("keys", "add")], ids=" ".join)
def test_help_of_a_command_below_another_is_its_help(words: tuple[str, str]) -> None:
    shown = " ".join(invoke("help", *words).stdout.split())
    assert shown == " ".join(invoke(*words, "--help").stdout.split()).replace("Usage: root", "Usage: penstock")
    assert f" {words[1]} " in shown.partition("[OPTIONS]")[0]


@pytest.mark.parametrize(
    ("words", "lists"),
    [("serv", "penstock help"), ("hosts stup", "penstock help hosts"), ("serve demo", "penstock help serve")],
)
def test_help_of_no_command_is_refused(words: str, lists: str) -> None:
    result = invoke("help", *words.split())
    assert result.exit_code == 2
    assert f"command is '{words}'; '{lists}' shows what there is" in result.stderr
