"""The short names that ship are those of models that Penstock runs."""

from __future__ import annotations

import re
from pathlib import Path

import penstock
from penstock.checkpoint.gguf_header import SUPPORTED
from penstock.library.names import DEFAULT, HUB_ID, HubModel, hint, read_reference, short_names

FAMILIES = Path(penstock.__file__).parents[1] / "docs" / "reference" / "families.md"
WRITTEN_AS = {"mistral": "llama", "mistral3": "llama", "gemma3_text": "gemma3"}
"""Families whose GGUF files have another architecture's name."""


def test_every_short_name_is_of_a_family_that_runs() -> None:
    row = next(line for line in FAMILIES.read_text(encoding="utf-8").splitlines() if line.startswith("| runs |"))
    running = set(re.findall(r"`(\w+)`", row))
    assert {name: one.family for name, one in short_names().items() if one.family not in running} == {}


def test_those_of_gguf_files_are_of_an_architecture_that_is_read() -> None:
    files = {name: WRITTEN_AS.get(one.family, one.family) for name, one in short_names().items() if ":" in one.pull}
    assert {name: family for name, family in files.items() if family not in SUPPORTED} == {}


def test_a_short_name_stands_for_a_hub_id() -> None:
    assert len(short_names()) > 20
    for name, one in short_names().items():
        assert HUB_ID.fullmatch(one.model) is not None
        assert HUB_ID.fullmatch(one.pull) is not None
        reference = read_reference(name)
        assert isinstance(reference, HubModel)
        assert (reference.name, reference.typed) == (one.pull, name)


def test_the_default_model_can_be_had_without_a_hub() -> None:
    known = short_names()[DEFAULT]
    assert known.package is not None
    assert known.package.sha256 == "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
    assert known.title == "SmolLM2-135M-Instruct"


def test_typos_are_guessed() -> None:
    assert hint("smolm2") == "; did you mean 'smollm2'?"
    assert hint("smollm2") == hint("Qwen/Qwen3-8B") == ""
