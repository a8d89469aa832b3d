"""The demo pair and prompts in the package, and what the model card says of them."""

from __future__ import annotations

import json

import pytest
from safetensors import safe_open

from penstock.engine.options import DEMO, EngineOptions
from penstock.engine.resolve import resolve_options
from penstock.lab.grid import DEFAULT_PROMPTS, read_prompts
from penstock.text.tokenizer import load_tokenizer


def test_the_pair_stays_within_twenty_megabytes() -> None:
    files = [file for part in ("target", "draft") for file in (DEMO / part).rglob("*")]
    assert sum(file.stat().st_size for file in files) < 20e6


def test_target_and_draft_have_the_promised_shape_and_one_tokenizer() -> None:
    options = EngineOptions(speculative_config={"method": "draft_model", "model": "demo"})
    setup = resolve_options(options)
    assert setup.draft is not None
    assert (setup.checkpoint.num_layers, setup.checkpoint.vocab_size) == (16, 4096)
    assert setup.draft.num_layers < setup.checkpoint.num_layers
    text = "def read(path):\n    return open(path).read()\n"
    ids = [load_tokenizer(DEMO / part).encode(text) for part in ("target", "draft")]
    assert ids[0] == ids[1]


@pytest.mark.parametrize("part", ["target", "draft"])
def test_weights_are_bfloat16_safetensors(part: str) -> None:
    with safe_open(DEMO / part / "model.safetensors", framework="pt") as tensors:
        assert {str(tensors.get_slice(name).get_dtype()) for name in tensors.keys()} == {"BF16"}  # noqa: SIM118


def test_prompts_come_from_held_out_files_only() -> None:
    held_out = {line.split(" *")[1] for line in (DEMO / "corpus.sha256").read_text().splitlines()[1:] if " *" in line}
    entries = [json.loads(line) for line in DEFAULT_PROMPTS.read_text().splitlines()]
    sources = [entry["source"] for entry in entries if entry["source"] != "penstock"]
    assert len(sources) > 40
    assert all(source.split(", ")[1].removesuffix(" (held out)") in held_out for source in sources)
    assert len(read_prompts(DEFAULT_PROMPTS, 1000)) == len(entries)


def test_the_model_card_states_what_was_measured() -> None:
    card = (DEMO / "README.md").read_text()
    for words in ("held-out loss", "top 1", "PSF", "train_demo.py"):
        assert words in card
    assert "{" not in card, "every figure is filled in"
