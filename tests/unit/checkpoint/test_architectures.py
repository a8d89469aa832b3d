"""Supported architectures pass the gate; the others are refused by name and reason."""

from __future__ import annotations

import pytest
from transformers import AutoConfig

from penstock.checkpoint.architectures import RECURRENT, ModuleNames, check_supported, text_config
from penstock.core import ConfigError


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("gpt2", "no pipeline plan"),
        ("bert", "no pipeline plan"),
        ("gemma3n", "multimodal"),
        ("mamba", "linear_attention"),
        ("minimax", "linear_attention"),
        ("zamba2", "hybrid"),
        ("deepseek_v32", "indexed_attention"),
        ("gemma3", "multimodal"),
        ("doge", "brings its own attention mask"),
        ("dbrx", "no pipeline plan"),
        ("t5", "encoder-decoder"),
        ("llava", "no causal language model"),
    ],
)
def test_refusal_names_architecture_and_reason(model_type: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=f"'{model_type}'.*{reason}"):
        check_supported(AutoConfig.for_model(model_type))


def test_a_text_part_that_is_no_model_by_itself_is_refused() -> None:
    with pytest.raises(ConfigError, match="'llava' is not supported: it is a multimodal wrapper"):
        text_config(AutoConfig.for_model("llava"))


def test_a_text_part_that_would_not_run_alone_either_says_so() -> None:
    with pytest.raises(ConfigError, match=r"'qwen4_exp' is not .*neither is its text part 'qwen4_exp_text': its"):
        text_config(AutoConfig.for_model("qwen4_exp"))


def test_parts_come_from_the_pipeline_plan() -> None:
    assert check_supported(AutoConfig.for_model("llama")) == ModuleNames("model", "embed_tokens", "layers", "norm")
    assert check_supported(AutoConfig.for_model("phi")) == ModuleNames(
        "model", "embed_tokens", "layers", "final_layernorm"
    )
    assert check_supported(AutoConfig.for_model("gpt_neox")).embed == "embed_in"


@pytest.mark.parametrize("field", ["num_kv_shared_layers", "hidden_size_per_layer_input"])
def test_what_rows_carry_is_known_of_some_architectures_alone(field: str) -> None:
    assert check_supported(AutoConfig.for_model("gemma4_text", **{field: 2})).norm == "norm"
    with pytest.raises(ConfigError, match=r"'llama' .*(share keys and values|per-layer embeddings)"):
        check_supported(AutoConfig.for_model("llama", **{field: 2}))


@pytest.mark.parametrize("model_type", RECURRENT)
def test_layers_that_carry_a_state_pass(model_type: str) -> None:
    assert check_supported(AutoConfig.for_model(model_type)) == RECURRENT[model_type]
