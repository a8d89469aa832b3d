"""An emulated ARM processor computes what this one does: `make test-arm`, with qemu's user mode."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, field
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


@dataclass
class Processors:
    """Figures of this processor and of emulated ones, part by part (``tests.arm.figures``), each computed once.

    A part takes minutes where every instruction is emulated, most of them to compile what the parts before it have not
    compiled yet.
    """

    emulated: Path
    """The folder that ``scripts/arm_root.py`` has made."""
    folder: Path
    found: dict[tuple[str, str], Figures] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.checkpoint = make_checkpoint(self.folder / "checkpoint", "qwen3", initializer_range=0.1)
        self.gguf = make_gguf(self.folder / "gguf", kind=Kind.Q8_0)

    def here(self, part: str) -> Figures:
        """The figures of this processor."""
        return self._computed("here", part, [sys.executable])

    def there(self, kind: str, part: str) -> Figures:
        """The figures of an ARM processor that has an instruction for products of bytes, or has none."""
        made, root = self.emulated, self.emulated / "root"
        command = ["qemu-aarch64-static", "-cpu", "max", "-L", str(root), str(root / "usr/bin/python3.11")]
        return self._computed(
            kind,
            part,
            command,
            PYTHONPATH=f"{made / 'site'}{os.pathsep}{ROOT}",
            NUMBA_CPU_NAME="generic",
            NUMBA_CPU_FEATURES=FORCED[kind],
            XDG_CACHE_HOME=str(self.folder / kind),
        )

    def _computed(self, where: str, part: str, command: list[str], **environment: str) -> Figures:
        if (where, part) not in self.found:
            out = self.folder / f"{where}-{part}.npz"
            arguments = [*command, "-m", "tests.arm.figures", str(self.checkpoint), str(self.gguf), str(out), part]
            ended = subprocess.run(arguments, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True)
            assert ended.returncode == 0, ended.stderr[-4000:]
            with np.load(out) as loaded:
                figures = dict(loaded)
            assert str(figures.pop("kind")) == where or where == "here"
            self.found[where, part] = figures
        return self.found[where, part]


@pytest.fixture(scope="module")
def processors(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Processors:
    return Processors(Path(request.config.getoption("--arm")).resolve(), tmp_path_factory.mktemp("arm"))


def differing(here: Figures, there: Figures) -> list[str]:
    """Names of the figures that differ in any bit, or that only one of the processors has."""
    assert here
    return [name for name in here.keys() | there if name not in here or name not in there or differ(here, there, name)]


def differ(here: Figures, there: Figures, name: str) -> bool:
    return here[name].tobytes() != there[name].tobytes()


@pytest.mark.parametrize("part", ["whole", "floats", "gguf", "engine"])
@pytest.mark.parametrize("kind", FORCED)
def test_bits_and_token_ids_are_equal(processors: Processors, kind: str, part: str) -> None:
    """Products, tensors of files, and ids of every strategy."""
    assert differing(processors.here(part), processors.there(kind, part)) == []


@pytest.mark.parametrize("kind", FORCED)
def test_logits_of_every_format_are_near_and_in_16_bits_equal(processors: Processors, kind: str) -> None:
    """In float32 torch's cosines, exponentials and norms may be off by a last place, which 16 bits round away."""
    here, there = processors.here("layers"), processors.there(kind, "layers")
    assert here.keys() == there.keys()
    for name, numbers in here.items():
        allowed = 0 if name.endswith("16") else ULPS * np.spacing(np.abs(numbers).max())
        assert np.abs(numbers - there[name]).max() <= allowed, name


@pytest.mark.parametrize("kind", FORCED)
def test_draws_are_equal_and_noise_and_chances_are_near(processors: Processors, kind: str) -> None:
    """Noise is -log(E): where it is near 0, a last place of E, which is then near 1, is many of its own."""
    here, there = processors.here("sampler"), processors.there(kind, "sampler")
    assert here.keys() == there.keys()
    for name, numbers in here.items():
        if "draws" in name:
            assert not differ(here, there, name), name
            continue
        size = np.maximum(np.abs(numbers), 1) if "noise" in name else np.abs(numbers)
        assert (np.abs(numbers - there[name]) <= ULPS * np.spacing(size)).all(), name
