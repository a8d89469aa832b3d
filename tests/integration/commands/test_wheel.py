"""The wheel: small enough, and all there where nothing of the checkout is."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import penstock

ROOT = Path(__file__).parents[3]
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "docs/reference/penstock.1")
MOST_BYTES = 25_000_000

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy because setuptools leaves folders where it works."""
    copy, out = tmp_path_factory.mktemp("checkout"), tmp_path_factory.mktemp("dist")
    for name in SOURCES:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, copy / name)
    shutil.copytree(ROOT / "penstock", copy / "penstock", ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, copy]
    subprocess.run(command, capture_output=True, check=True)
    (found,) = out.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def place(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment of its own with the wheel in it; what it depends on is the tests'."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    pip = [sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "install", "--quiet"]
    subprocess.run([*pip, "--no-deps", "--no-index", "--no-compile", wheel], check=True)
    site = next((folder / "lib").glob("python*/site-packages"))
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    return folder


def run(place: Path, *words: str, **variables: str) -> str:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | variables
    done = subprocess.run([place / "bin" / words[0], *words[1:]], cwd=place, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_is_small(wheel: Path) -> None:
    assert wheel.name.startswith(f"penstock-{penstock.__version__}-")
    assert wheel.stat().st_size < MOST_BYTES


def test_it_runs_by_itself(place: Path) -> None:
    where = run(place, "python", "-c", "import penstock; print(penstock.__file__)").strip()
    assert Path(where).is_relative_to(place)
    assert run(place, "penstock", "--version") == f"penstock {penstock.__version__}\n"
    options = ("--model", "demo", "--max-tokens", "8", "-pp", "2", "--draft-model", "demo", "--json")
    assert json.loads(run(place, "penstock", "generate", "import os", *options))["metrics"]["tokens"] == 8


def test_shells_and_man_know_it(place: Path) -> None:
    asked = {"_PENSTOCK_COMPLETE": "complete_bash", "COMP_WORDS": "penstock generate --strat", "COMP_CWORD": "2"}
    assert run(place, "penstock", **asked).split() == ["--strategy"]
    assert (place / "share" / "man" / "man1" / "penstock.1").is_file()
