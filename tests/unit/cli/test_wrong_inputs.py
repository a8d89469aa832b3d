"""Every command refuses, before torch is imported, inputs that names and files show to be wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.costs.wrong_inputs import WrongInput, wrong_inputs

PROGRAM = """
import contextlib, io, json, sys
from penstock.cli.app import app

sys.modules |= dict.fromkeys(json.loads(sys.argv[2]))  # None: as if it were not installed
found = []
for words in json.loads(sys.argv[1]):
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        try:
            app(words)
            code = 0
        except SystemExit as end:
            code = end.code
    found.append([code, said.getvalue(), sorted({"torch", "transformers"} & set(sys.modules))])
print(json.dumps(found))
"""


def tried(inputs: list[WrongInput], lacking: list[str]) -> list[tuple[int, str, list[str]]]:
    """Return each input's exit code, message and heavy packages loaded by then; one process tries them all."""
    words = json.dumps([wrong.words for wrong in inputs])
    command = [sys.executable, "-c", PROGRAM, words, json.dumps(lacking)]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=True)
    return [tuple(one) for one in json.loads(done.stdout)]


def test_wrong_inputs_are_refused_before_torch_is_imported(tmp_path: Path) -> None:
    inputs = wrong_inputs(tmp_path)
    wrong = []
    for given, (code, said, loaded) in zip(inputs, tried(inputs, []), strict=True):
        if code not in (1, 2) or given.said not in said or said.count("\n") > 1 or loaded:
            wrong.append((given.words, code, said, loaded))
    assert wrong == []


def test_all_that_is_not_installed_is_named_at_once_and_after_missing_files(tmp_path: Path) -> None:
    files = [given for given in wrong_inputs(tmp_path) if "--report" in given.words or given.words[0] == "train"]
    model, notes, report = (str(tmp_path / name) for name in ("model", "notes.txt", "report"))
    train = ("train", "eagle", "--data", notes, "--output", str(tmp_path / "out"), "--model", model)
    lacking = [
        WrongInput(train, "training needs accelerate and training's curves need matplotlib: "),
        WrongInput(("simulate", "--cluster", "demo", "--report", report), "plots need matplotlib: "),
        WrongInput(("bench", "--report", report), "plots need matplotlib: "),
    ]
    inputs = [*files, *lacking]
    found = [said for _, said, _ in tried(inputs, ["matplotlib", "accelerate", "xllamacpp"])]
    assert [said for given, said in zip(inputs, found, strict=True) if given.said not in said] == []
    assert all("pip install" in said for said in found[len(files) :])
    assert [name for name in ("out", "report") if (tmp_path / name).exists()] == []


@pytest.mark.parametrize("words", [("generate", "x", "--model", "demo", "-pp", "17"), ("serve", "demo", "-pp", "17")])
def test_the_demo_pair_is_no_exception(words: tuple[str, ...]) -> None:
    ((code, said, loaded),) = tried([WrongInput(words, "")], [])
    assert (code, loaded) == (2, [])
    assert "the model has 16 layers" in said
