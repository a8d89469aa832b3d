"""Every family computes on its own device, and a batch waits for no number there: see ``tests/fake_gpu.py``."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Any

import pytest
import transformers

from benchmarks.strategies.families import ALL
from scripts.gpu_docs import PAGE, family_of, page, row
from tests.fake_gpu import ROOT, outcomes

SAMPLE = ("qwen3", "gpt_oss", "deepseek_v3", "nemotron_h", "gemma3n")
"""Fused layers; experts, sinks and windows; latents; a state from row to row; rows that carry more than one state."""
OTHERS = tuple(name for name in ALL if name not in SAMPLE)
REST = [OTHERS[first : first + 6] for first in range(0, len(OTHERS), 6)]

SAMPLE_AND_FAULTS = """
import json
import sys
from unittest.mock import patch
import torch
from penstock.models.fused import FusedBase
from tests.fake_gpu import begin, outcome

begin()
for name in sys.argv[1:]:
    print(json.dumps(outcome(name)))
honest = FusedBase.through
faults = {
    "reads": lambda self, hidden, rotation: hidden * hidden.sum().item(),
    "asks": lambda self, hidden, rotation: hidden if hidden.isfinite().all() else hidden,
    "mixes": lambda self, hidden, rotation: honest(self, hidden + torch.zeros(hidden.shape), rotation),
    "copies": lambda self, hidden, rotation: honest(self, hidden.cpu().to(hidden.device), rotation),
}
for name, through in faults.items():
    with patch.object(FusedBase, "through", through):
        print(json.dumps([name, outcome("llama").get("error", "")]))
"""
"""Prints the outcomes of families, then what is said of layers with a fault, from one process."""


@pytest.fixture(scope="module")
def printed() -> list[Any]:
    """The output of ``SAMPLE_AND_FAULTS``, line by line."""
    command = [sys.executable, "-c", SAMPLE_AND_FAULTS, *SAMPLE]
    ran = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return [json.loads(line) for line in ran.stdout.splitlines()]


def check(names: tuple[str, ...], found: list[dict[str, Any]]) -> None:
    """They go through, and docs/reference/gpus.md says of them what is so; it holds for one release of transformers."""
    assert [one["name"] for one in found] == list(names)
    assert [one for one in found if "error" in one] == []
    text = PAGE.read_text(encoding="utf-8")
    for one in found if f"transformers {transformers.__version__}" in text else ():
        start = row(one["copies"], one["whole_numbers"], []).rstrip(" |\n") + " |"
        (line,) = (line for line in text.splitlines() if line.startswith(start))
        assert f"`{family_of(one['name'])}`" in line


def test_a_sample_of_families(printed: list[Any]) -> None:
    check(SAMPLE, printed[: len(SAMPLE)])


@pytest.mark.whole
@pytest.mark.parametrize("names", REST, ids=lambda names: f"{names[0]} to {names[-1]}")
def test_all_other_families(names: tuple[str, ...]) -> None:
    check(names, outcomes(names))


def test_what_a_gpu_waits_for_or_refuses_is_seen(printed: list[Any]) -> None:
    found = dict(printed[len(SAMPLE) :])
    assert found["reads"].startswith("DataDependentOutputException")
    assert found["asks"].startswith("DataDependentOutputException")
    assert "device" in found["mixes"]
    assert "copies to the host" in found["copies"]


def test_the_page_has_every_family() -> None:
    table = PAGE.read_text(encoding="utf-8").partition("| --- | --- | --- |")[2]
    assert set(re.findall(r"`(\w+)`", table)) == {family_of(name) for name in ALL}


def test_no_page_is_written_of_a_family_that_fails() -> None:
    with pytest.raises(ValueError, match="gemma2: IndexError: no at here"):
        page([{"name": "gemma2", "error": "IndexError: no", "at": "here"}])
    assert page([{"name": "gemma2", "copies": 4, "whole_numbers": True}]).endswith(
        "| 4 | floats, int8, int4 | `gemma2` |\n"
    )
