"""What a stage is said to take is at most what it holds once it is loaded, and most of that."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoConfig

from penstock.engine.options import EngineOptions
from penstock.engine.places.footprint import attending, kv_width, needed_bytes, numbers_by_part
from penstock.engine.resolve import resolve_options
from penstock.models.stage_model import load_stage
from tests.checkpoints import ARCHITECTURES, UNUSUAL, make_checkpoint


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


def test_latents_are_counted_in_place_of_keys_and_values() -> None:
    config = AutoConfig.for_model(**ARCHITECTURES["deepseek_v3"])
    assert 2 * kv_width(config) == 16 + 8
    assert kv_width(AutoConfig.for_model("llama", hidden_size=64, num_attention_heads=4)) == 64


def test_layers_that_read_anothers_keys_keep_none() -> None:
    config = AutoConfig.for_model(**UNUSUAL["gemma4_shared"])
    assert attending(config, 7) == [True, True, True, False, False, False, False]


def test_what_is_for_every_layer_is_spread_over_them() -> None:
    sizes = {"model.layers.0.w": 10, "model.layers.1.w": 30, "model.embed_tokens_per_layer.weight": 8, "lm_head.w": 3}
    assert numbers_by_part(sizes) == {0: 14, 1: 34, "rest": 3}
