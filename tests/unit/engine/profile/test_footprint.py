"""The estimate of a stage's memory is at most what the loaded stage holds, and most of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoConfig

from penstock.engine import opening
from penstock.engine.options import EngineOptions
from penstock.engine.profile.measure import attending, carrying, kv_width, needed_bytes, numbers_by_part
from penstock.engine.resolve import resolve_options
from penstock.models.attention import windowed
from penstock.models.stage_model import load_stage
from tests.checkpoints import ARCHITECTURES, UNUSUAL, make_checkpoint
from tests.unit.stage.test_near import chain


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


@pytest.mark.parametrize(("architecture", "near"), [("mistral_window", 5), ("gemma3", 3), ("qwen3_5", 3), ("llama", 0)])
def test_without_prefix_caching_layers_that_reach_only_so_far_take_less(
    architecture: str, near: int, tmp_path: Path
) -> None:
    """The text is mostly out of the layers' reach, and there are more slots than a layer of that kind has places."""
    folder = str(make_checkpoint(tmp_path, architecture))
    options = {"max_model_len": 512, "kv_slots": 4096, "speculative_config": None, "enable_prefix_caching": False}
    setup = resolve_options(EngineOptions(model=folder, **options))
    whole = resolve_options(EngineOptions(model=folder, **{**options, "enable_prefix_caching": True}))
    assert sum(windowed(setup.checkpoint.config, 5)) + sum(carrying(setup.checkpoint.config)) == near
    stage = load_stage(folder, 0, 5, capacity=setup.capacity, gives_back=True)
    for first in range(0, 400, 40):
        stage.forward(chain(first, first + 40), None)
    kept = load_stage(folder, 0, 5, capacity=setup.capacity).kv_bytes
    saved = needed_bytes(whole)[0] - needed_bytes(setup)[0]
    assert 0.9 * saved <= kept - stage.kv_bytes <= saved
    assert (stage.kv_bytes < kept) == (near > 0)


def test_memory_for_sharing_alone_is_told_where_it_is_much(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The bound is the memory of all slots but the window: 3 layers, 2 heads, keys and values of 16 floats."""

    def told_of(architecture: str, shares: bool) -> str:
        folder = make_checkpoint(tmp_path / f"{architecture}{shares}", architecture)
        options = {"max_model_len": 512, "kv_slots": 4096, "speculative_config": None, "enable_prefix_caching": shares}
        setup = resolve_options(EngineOptions(model=str(folder), **options))
        caplog.clear()
        assert opening.told(setup) is setup
        return caplog.text

    assert told_of("gemma3", shares=True) == "", "a few megabytes are nothing"
    monkeypatch.setattr(opening, "WORTH_TELLING", 3 * (4096 - 6) * 2 * 2 * 16 * 4 - 1)
    assert "--no-enable-prefix-caching" in told_of("gemma3", shares=True)
    assert told_of("gemma3", shares=False) == ""
    assert told_of("llama", shares=True) == ""


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
