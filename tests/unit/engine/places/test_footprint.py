"""What a stage is said to take is at most what it holds once it is loaded, and most of that."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.engine.options import EngineOptions
from penstock.engine.places.footprint import needed_bytes
from penstock.engine.resolve import resolve_options
from penstock.models.stage_model import load_stage
from tests.checkpoints import make_checkpoint


@pytest.mark.parametrize("architecture", ["llama", "qwen3_5", "kimi_linear", "granitemoehybrid", "lfm2"])
def test_slots_are_counted_of_attention_and_of_states(architecture: str, tmp_path: Path) -> None:
    folder = str(make_checkpoint(tmp_path, architecture))
    few, many = (
        resolve_options(EngineOptions(model=folder, max_model_len=64, kv_slots=slots, speculative_config=None))
        for slots in (256, 512)
    )
    more = needed_bytes(many)[0] - needed_bytes(few)[0]
    held = [load_stage(folder, 0, 5, capacity=setup.capacity).kv_bytes for setup in (few, many)]
    assert 0.7 * (held[1] - held[0]) <= more <= held[1] - held[0]
