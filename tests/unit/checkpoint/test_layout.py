"""The contents of a row at every cut of a model that shares keys and values."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig

from penstock.checkpoint.architectures import carries, is_outside, made_by, pieces_before, row_width, shared_layers
from tests.checkpoints import ARCHITECTURES, UNUSUAL

SLIDING = (2, 2, 16)
FULL = (2, 2, 24)
"""(keys and values, heads, width) of a layer with a window, and of one with full attention."""


def config_of(settings: dict[str, Any]) -> Any:
    widths = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    return AutoConfig.for_model(**{**widths, "num_hidden_layers": 5, **settings})


def test_what_is_shared_travels_from_its_maker_to_its_last_reader() -> None:
    config = config_of(UNUSUAL["gemma4_shared"])
    assert [(one.kind, one.layer, one.last_reader) for one in shared_layers(config)] == [
        ("full_attention", 1, 6),
        ("sliding_attention", 2, 5),
    ]
    assert made_by(config) == {3: 2, 4: 1, 5: 2, 6: 1}
    always = {"hidden": (1, 32), "embedded": (32,)}
    assert pieces_before(config, 1) == always
    assert pieces_before(config, 2) == {**always, "full_attention": FULL}
    assert pieces_before(config, 5) == {**always, "full_attention": FULL, "sliding_attention": SLIDING}
    assert pieces_before(config, 6) == {**always, "full_attention": FULL}
    assert pieces_before(config, 7) == {"hidden": (1, 32)}
    assert row_width(config, 5) == 32 + 32 + 2 * 2 * 24 + 2 * 2 * 16


def test_the_several_states_of_gemma_3n_are_one_behind_the_last_layer() -> None:
    config = config_of(UNUSUAL["gemma3n"])
    assert pieces_before(config, 1)["hidden"] == (3, 32)
    assert row_width(config, 7) == 32


@pytest.mark.parametrize("settings", [ARCHITECTURES["llama"], UNUSUAL["gemma4"]])
def test_other_models_carry_hidden_states_alone(settings: dict[str, Any]) -> None:
    config = config_of(settings)
    assert not carries(config)
    assert row_width(config, 3) == 32


def test_names_outside_of_the_layers() -> None:
    assert is_outside("model.embed_tokens_per_layer.weight")
    assert not is_outside("model.embed_tokens.weight")
    assert not is_outside("model.layers.3.per_layer_projection.weight")
