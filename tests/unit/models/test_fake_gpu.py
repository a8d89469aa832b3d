"""Every family computes on its own device, and a batch waits for no number there: see ``tests/fake_gpu.py``."""

from __future__ import annotations

import multiprocessing
import re
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any
from unittest.mock import patch

import pytest
import torch
import transformers
from torch import Tensor

from benchmarks.strategies.families import ALL
from penstock.models.fused import FusedBase
from scripts.gpu_docs import PAGE, family_of, page, row
from tests.fake_gpu import begin, outcome, outcomes

SAMPLE = ("qwen3", "gpt_oss", "deepseek_v3", "nemotron_h", "gemma3n")
"""Fused layers; experts, sinks and windows; latents; a state from row to row; rows that carry more than one state."""
OTHERS = tuple(name for name in ALL if name not in SAMPLE)
REST = [OTHERS[first : first + 6] for first in range(0, len(OTHERS), 6)]


def faults() -> dict[str, Callable[..., Tensor]]:
    """Computations in place of a fused layer's own, none of which would do on a GPU."""
    honest = FusedBase.through
    return {
        "reads": lambda self, hidden, rotation: hidden * hidden.sum().item(),
        "asks": lambda self, hidden, rotation: hidden * bool(hidden.isfinite().all()),
        "mixes": lambda self, hidden, rotation: honest(self, hidden + torch.zeros(hidden.shape), rotation),
        "copies": lambda self, hidden, rotation: honest(self, hidden.cpu().to(hidden.device), rotation),
    }


def sample_and_faults() -> tuple[list[dict[str, Any]], dict[str, str]]:
    """The outcomes of the sample, and what is said of a llama whose layers have each fault."""
    begin()
    sample, said = [outcome(name) for name in SAMPLE], {}
    for name, through in faults().items():
        with patch.object(FusedBase, "through", through):
            said[name] = outcome("llama").get("error", "")
    return sample, said


@pytest.fixture(scope="module")
def tried() -> tuple[list[dict[str, Any]], dict[str, str]]:
    """``sample_and_faults`` of a fork: the device belongs to a whole process, and this one has imported torch."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as forks:
        return forks.submit(sample_and_faults).result()


def check(names: tuple[str, ...], found: list[dict[str, Any]]) -> None:
    """They go through, and docs/reference/gpus.md says of them what is so; it holds for one release of transformers."""
    assert [one["name"] for one in found] == list(names)
    assert [one for one in found if "error" in one] == []
    text = PAGE.read_text(encoding="utf-8")
    for one in found if f"transformers {transformers.__version__}" in text else ():
        start = row(one["copies"], one["whole_numbers"], []).rstrip(" |\n") + " |"
        (line,) = (line for line in text.splitlines() if line.startswith(start))
        assert f"`{family_of(one['name'])}`" in line


def test_a_sample_of_families(tried: tuple[list[dict[str, Any]], dict[str, str]]) -> None:
    check(SAMPLE, tried[0])


@pytest.mark.whole
@pytest.mark.parametrize("names", REST, ids=lambda names: f"{names[0]} to {names[-1]}")
def test_all_other_families(names: tuple[str, ...]) -> None:
    check(names, outcomes(names))


def test_what_a_gpu_waits_for_or_refuses_is_seen(tried: tuple[list[dict[str, Any]], dict[str, str]]) -> None:
    _, said = tried
    assert said["reads"].startswith("DataDependentOutputException")
    assert said["asks"].startswith("DataDependentOutputException")
    assert "device" in said["mixes"]
    assert "copies to the host" in said["copies"]


def test_the_page_has_every_family() -> None:
    table = PAGE.read_text(encoding="utf-8").partition("| --- | --- | --- |")[2]
    assert set(re.findall(r"`(\w+)`", table)) == {family_of(name) for name in ALL}


def test_no_page_is_written_of_a_family_that_fails() -> None:
    with pytest.raises(ValueError, match="gemma2: IndexError: no at here"):
        page([{"name": "gemma2", "error": "IndexError: no", "at": "here"}])
    assert page([{"name": "gemma2", "copies": 4, "whole_numbers": True}]).endswith(
        "| 4 | floats, int8, int4 | `gemma2` |\n"
    )
