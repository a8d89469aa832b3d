"""An emulated ARM processor computes what this one does: `make test-arm`, with qemu's user mode."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import numpy as np
import pytest

from penstock.models.compiled.dot import DOTPROD, PLAIN
from tests.checkpoints import make_checkpoint
from tests.gguf_files import Kind, make_gguf

pytestmark = [pytest.mark.arm, pytest.mark.timeout(3600)]

Figures = dict[str, np.ndarray]
ROOT: Final = Path(__file__).parents[2]
FORCED: Final = {DOTPROD: "+neon,+fp-armv8,+dotprod", PLAIN: "+neon,+fp-armv8"}
"""LLVM's features by kind. They are given, because LLVM would read them from this machine's list of processors."""
ULPS: Final = 4
"""How many of its last places a number may be off where the C library's functions are in it."""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint and a GGUF file for both processors."""
    folder = tmp_path_factory.mktemp("files")
    checkpoint = make_checkpoint(folder / "checkpoint", "qwen3", initializer_range=0.1)
    return checkpoint, make_gguf(folder / "gguf", kind=Kind.Q8_0)


def computed(command: list[str], files: tuple[Path, Path], out: Path, **environment: str) -> Figures:
    arguments = [*command, "-m", "tests.arm.figures", *map(str, files), str(out)]
    ended = subprocess.run(arguments, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-4000:]
    with np.load(out) as found:
        return dict(found)


@pytest.fixture(scope="module")
def here(files: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Figures:
    """The figures of this processor."""
    return computed([sys.executable], files, tmp_path_factory.mktemp("here") / "figures.npz")


@pytest.fixture(scope="module", params=FORCED)
def there(
    request: pytest.FixtureRequest, files: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Figures:
    """The figures of an ARM processor that has an instruction for products of bytes, or has none."""
    made = Path(request.config.getoption("--arm")).resolve()
    emulated = ["qemu-aarch64-static", "-cpu", "max", "-L", str(made / "root"), str(made / "root/usr/bin/python3.11")]
    folder = tmp_path_factory.mktemp(request.param)
    found = computed(
        emulated,
        files,
        folder / "figures.npz",
        PYTHONPATH=f"{made / 'site'}{os.pathsep}{ROOT}",
        NUMBA_CPU_NAME="generic",
        NUMBA_CPU_FEATURES=FORCED[request.param],
        XDG_CACHE_HOME=str(folder),
    )
    assert found.pop("kind") == request.param
    return found


def differing(here: Figures, there: Figures, part: str) -> list[str]:
    """Names of the figures of a part that differ in any bit."""
    names = [name for name in here if name.startswith(part)]
    assert names
    return [name for name in names if here[name].tobytes() != there[name].tobytes()]


def test_the_same_figures_are_there(here: Figures, there: Figures) -> None:
    assert {*here} - {"kind"} == {*there}


@pytest.mark.parametrize("part", ["whole", "floats", "gguf", "layers"])
def test_bits_are_equal(here: Figures, there: Figures, part: str) -> None:
    assert differing(here, there, part) == []


def test_token_ids_of_every_strategy_are_equal(here: Figures, there: Figures) -> None:
    assert differing(here, there, "engine") == []


def test_draws_are_equal(here: Figures, there: Figures) -> None:
    assert differing(here, there, "sampler/draws") == []


def test_noise_and_chances_are_near(here: Figures, there: Figures) -> None:
    """Noise is -log(E): where it is near 0, a last place of E, which is then near 1, is many of its own."""
    names = [name for name in here if name.startswith("sampler/") and "draws" not in name]
    assert names
    for name in names:
        size = np.maximum(np.abs(here[name]), 1) if "noise" in name else np.abs(here[name])
        assert (np.abs(here[name] - there[name]) <= ULPS * np.spacing(size)).all(), name
