"""A torch without GPUs is known by its files; any other says itself what there is."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import pytest
import torch

from penstock.checkpoint import look
from penstock.checkpoint.look import LEAST, check_built_for, check_version, stated_version
from penstock.config import FieldError
from penstock.core import ConfigError
from penstock.engine.options import EngineOptions
from penstock.engine.resolve import check_options

FOR_CPUS = "cuda: Optional[str] = None\ngit_version = 'a'\nhip: Optional[str] = None\n"
FOR_CUDA = "cuda: Optional[str] = '13.0'\ngit_version = 'a'\nhip: Optional[str] = None\n"
FOR_ROCM = "cuda: Optional[str] = None\ngit_version = 'a'\nhip: Optional[str] = '7.0'\n"


@pytest.fixture(autouse=True)
def not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """The state in which a command finds torch before it has looked at its options: not imported."""
    monkeypatch.delitem(sys.modules, "torch")


def test_the_installed_torch_is_found() -> None:
    assert f"__version__ = '{torch.__version__}'" in stated_version()


@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_a_build_for_cpus_is_refused_a_gpu(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    monkeypatch.setattr(look, "stated_version", lambda: FOR_CPUS)
    with pytest.raises(FieldError, match="built without CUDA; use cpu"):
        check_built_for(device)


def test_a_torch_that_is_imported_speaks_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(look, "stated_version", lambda: FOR_CPUS)
    check_built_for("cuda")


@pytest.mark.parametrize(
    ("device", "version"), [("cpu", FOR_CPUS), ("cuda", FOR_CUDA), ("cuda", FOR_ROCM), ("cuda", ""), ("cuda", "else")]
)
def test_all_else_is_left_to_torch(monkeypatch: pytest.MonkeyPatch, device: str, version: str) -> None:
    monkeypatch.setattr(look, "stated_version", lambda: version)
    check_built_for(device)


def test_a_torch_that_is_too_old_is_refused_with_what_installs_a_newer_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(look, "stated_version", lambda: "__version__ = '2.6.0+cu124'\n")
    with pytest.raises(
        ConfigError, match=r"^torch 2\.6\.0\+cu124 is installed, and Penstock needs 2\.7 or later: .*torch"
    ):
        check_options(EngineOptions())


@pytest.mark.parametrize("version", ["2.7.0", "2.13.0+cpu", "10.0.1", "here.and.now"])
def test_a_newer_torch_is_not(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(look, "stated_version", lambda: f"__version__ = '{version}'\ndebug = False\n")
    check_version()


def test_the_package_asks_for_what_is_checked() -> None:
    stated = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())
    assert f"torch>={LEAST[0]}.{LEAST[1]}" in stated["project"]["dependencies"]
