"""A torch without GPUs is known by its files; any other says itself what there is."""

from __future__ import annotations

import sys

import pytest
import torch

from penstock.config import FieldError
from penstock.models import torch_build
from penstock.models.torch_build import check_built_for, stated_version

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
    monkeypatch.setattr(torch_build, "stated_version", lambda: FOR_CPUS)
    with pytest.raises(FieldError, match="built without CUDA; use cpu"):
        check_built_for(device)


def test_a_torch_that_is_imported_speaks_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(torch_build, "stated_version", lambda: FOR_CPUS)
    check_built_for("cuda")


@pytest.mark.parametrize(
    ("device", "version"), [("cpu", FOR_CPUS), ("cuda", FOR_CUDA), ("cuda", FOR_ROCM), ("cuda", ""), ("cuda", "else")]
)
def test_all_else_is_left_to_torch(monkeypatch: pytest.MonkeyPatch, device: str, version: str) -> None:
    monkeypatch.setattr(torch_build, "stated_version", lambda: version)
    check_built_for(device)
