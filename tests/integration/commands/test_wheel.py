"""The wheel: small enough, and all there where nothing of the checkout is."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

import penstock
from tests.image import tracked

ROOT = Path(__file__).parents[3]
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "docs/reference/penstock.1")
MOST_BYTES = 28_000_000

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder named penstock, as a clone is, because setuptools leaves folders where it works."""
    copy = tmp_path_factory.mktemp("beside") / "penstock"
    for name in SOURCES:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, copy / name)
    shutil.copytree(ROOT / "penstock", copy / "penstock", ignore=shutil.ignore_patterns("__pycache__"))
    return copy


@pytest.fixture(scope="module")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, checkout]
    subprocess.run(command, capture_output=True, check=True)
    (found,) = out.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def place(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return environment(tmp_path_factory.mktemp("environment"), "--no-compile", wheel)


def environment(folder: Path, *installed: str | Path) -> Path:
    """An environment of its own with Penstock in it; what it depends on is the tests'."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    pip = [sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "install", "--quiet"]
    site = next((folder / "lib").glob("python*/site-packages"))
    # Whoever builds without isolation has to find setuptools.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    subprocess.run([*pip, "--no-deps", "--no-index", "--no-build-isolation", *installed], check=True)
    return folder


def run(place: Path, *words: str, where: Path | None = None, **variables: str) -> str:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | variables
    done = subprocess.run(
        [place / "bin" / words[0], *words[1:]], cwd=where or place, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_is_small(wheel: Path) -> None:
    assert wheel.name.startswith(f"penstock-{penstock.__version__}-")
    assert wheel.stat().st_size < MOST_BYTES


def test_all_that_the_checkout_has_of_the_package_is_in_it(wheel: Path) -> None:
    """The demo's checkpoints, presets, short names, outlines, page and licences; the manual page."""
    names = zipfile.ZipFile(wheel).namelist()
    here = {file for file in tracked() if file.startswith("penstock/")}
    assert here - set(names) == set()
    for end in (".data/data/share/man/man1/penstock.1", "dist-info/licenses/LICENSE", "penstock/demo/LICENSE.PSF"):
        assert any(name.endswith(end) for name in names), end


def test_an_editable_install_works_beside_the_clone(checkout: Path, tmp_path: Path) -> None:
    """A finder's package would be hidden there by the folder that is named like it."""
    made = environment(tmp_path / "environment", "--editable", checkout)
    code = "import penstock; from penstock import LLM; print(penstock.__file__)"
    where = run(made, "python", "-c", code, where=checkout.parent).strip()
    assert Path(where) == checkout / "penstock" / "__init__.py"


def test_it_runs_by_itself(place: Path) -> None:
    where = run(place, "python", "-c", "import penstock; print(penstock.__file__)").strip()
    assert Path(where).is_relative_to(place)
    assert run(place, "penstock", "--version") == f"penstock {penstock.__version__}\n"
    options = (
        "--model",
        "demo",
        "--max-tokens",
        "8",
        "--temperature",
        "0",
        "-pp",
        "2",
        "--draft-model",
        "demo",
        "--json",
    )
    assert json.loads(run(place, "penstock", "generate", "import os", *options))["metrics"]["tokens"] == 8


def test_shells_and_man_know_it(place: Path) -> None:
    asked = {"_PENSTOCK_COMPLETE": "complete_bash", "COMP_WORDS": "penstock generate --strat", "COMP_CWORD": "2"}
    assert run(place, "penstock", **asked).split() == ["--strategy"]
    assert (place / "share" / "man" / "man1" / "penstock.1").is_file()
