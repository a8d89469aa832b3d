"""The page of families says what the gate says, and calls nothing tested that is not."""

from __future__ import annotations

import re

import pytest
import transformers
from transformers import AutoConfig

from penstock.checkpoint.architectures import check_supported, text_config
from scripts.family_docs import PAGE, RUNS, TESTED, UNTESTED, row, verdict

CONSTRAINTS = PAGE.parents[2] / "constraints.txt"
SAMPLE = ["seed_oss", "gpt2", "bart", "mamba", "gemma4_unified_text", "deepseek_v4", "minimax"]


def rows() -> dict[str, set[str]]:
    """The families by what the page says of them."""
    lines = [line.strip("| ").split(" | ") for line in PAGE.read_text(encoding="utf-8").splitlines() if "`" in line[2:]]
    return {kind: set(names.replace("`", "").split(", ")) for kind, names in (line for line in lines if len(line) == 2)}


def test_what_is_tested_passes_the_gate() -> None:
    for family in ("llama4", "qwen3_5", "granitemoehybrid", "llama"):
        config = AutoConfig.for_model(family)
        assert check_supported(text_config(config)).layers == "layers"
    assert rows()[RUNS] == TESTED


@pytest.mark.parametrize("family", SAMPLE)
def test_the_page_says_what_the_gate_says(family: str) -> None:
    """Takes a sample, since all families take ten seconds. The page holds for one release of transformers."""
    found = verdict(family)
    told = rows().get(found if found in (RUNS, UNTESTED) else f"refused: {found}", set())
    assert transformers.__version__ not in PAGE.read_text(encoding="utf-8") or family in told


def test_the_page_is_of_the_release_that_constraints_name() -> None:
    pinned = re.search(r"^transformers==(.+)$", CONSTRAINTS.read_text(encoding="utf-8"), re.MULTILINE)
    assert pinned is not None
    assert f"transformers {pinned[1]} " in PAGE.read_text(encoding="utf-8")


def test_a_row() -> None:
    assert row("runs", ["b", "a"]) == "| runs | `a`, `b` |"
