"""Tiny random checkpoints of many architectures, written with save_pretrained: ``make_checkpoint(folder, "llama")``.

Their weights are drawn widely (initializer_range), so that greedy texts wander instead of repeating one token, and a
mask that is wrong anywhere changes them.
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedTokenizerFast
from transformers import logging as transformers_logging

from tests.relatives import EXPERTS, LATENT, LATENT_KEYS, MIXED, RELATIVES, ROUTED, SHARED_EXPERTS, WINDOW

_made = tempfile.TemporaryDirectory(prefix="penstock-tests-")
"""Checkpoints that ``make_checkpoint`` has made, by what it was told: many tests want the same ones."""

VOCAB: Final = 160
BYTE_VOCAB: Final = 259
EOS: Final = 1
LAYERS: Final = 5

_COMMON: Final[dict[str, Any]] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.4,
    "bos_token_id": 0,
    "eos_token_id": EOS,
    "pad_token_id": 2,
    "tie_word_embeddings": False,
}
_SHARED: Final = [
    "sliding_attention",
    "full_attention",
    "sliding_attention",
    "sliding_attention",
    "full_attention",
    "sliding_attention",
    "full_attention",
]
"""Attention kinds by layer; the last four layers read the keys and values of the second and third."""
_LLAMA3_ROPE: Final = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

ARCHITECTURES: Final[dict[str, dict[str, Any]]] = {
    "llama": {"model_type": "llama"},
    "llama_tied": {"model_type": "llama", "tie_word_embeddings": True},
    "llama3_rope": {"model_type": "llama", "rope_parameters": _LLAMA3_ROPE},
    "mistral": {"model_type": "mistral", "sliding_window": None},
    "mistral_window": {"model_type": "mistral", "sliding_window": WINDOW},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3", "head_dim": 16},
    "gemma2": {
        "model_type": "gemma2",
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window": WINDOW,
        "layer_types": MIXED,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 8.0,
        "tie_word_embeddings": True,
    },
    "gemma3": {
        "model_type": "gemma3_text",
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window": WINDOW,
        "layer_types": MIXED,
        "tie_word_embeddings": True,
    },
    "phi3": {"model_type": "phi3"},
    "olmo2": {"model_type": "olmo2"},
    "granite": {"model_type": "granite", "embedding_multiplier": 3.0, "logits_scaling": 2.0},
    "phi": {"model_type": "phi"},
    "gpt_neox": {"model_type": "gpt_neox", "num_key_value_heads": 4},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {
        "model_type": "gpt_oss",
        "head_dim": 16,
        "sliding_window": WINDOW,
        "layer_types": MIXED,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "deepseek_v3": {
        "model_type": "deepseek_v3",
        **LATENT,
        **ROUTED,
        "first_k_dense_replace": 2,
    },
}


_LOCAL: Final[dict[str, Any]] = {"num_local_experts": 4, **ROUTED}
FURTHER: Final[dict[str, dict[str, Any]]] = {
    "glm4_moe": {"model_type": "glm4_moe", "head_dim": 8, "first_k_dense_replace": 1, **_LOCAL},
    "minimax_m2": {"model_type": "minimax_m2", "head_dim": 8, "rotary_dim": 4, **_LOCAL},
    "exaone4": {"model_type": "exaone4", "sliding_window": WINDOW, "layer_types": MIXED},
    "smollm3": {"model_type": "smollm3", "no_rope_layers": [1, 1, 0, 1, 1]},
    "ernie4_5": {"model_type": "ernie4_5", "head_dim": 8},
}
"""More architectures with plain attention, which fewer tests go through."""
UNUSUAL: Final[dict[str, dict[str, Any]]] = {
    "llama4": {
        "model_type": "llama4_text",
        "head_dim": 8,
        "intermediate_size_mlp": 48,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "moe_layers": [1, 3],
        "attention_chunk_size": 5,
        "layer_types": [
            "chunked_attention",
            "chunked_attention",
            "chunked_attention",
            "full_attention",
            "chunked_attention",
        ],
        "no_rope_layers": [1, 1, 1, 0, 1],
        "attn_temperature_tuning": True,
        "floor_scale": 6,
        "attn_scale": 0.5,
    },
    "gemma4": {
        "model_type": "gemma4_text",
        "head_dim": 16,
        "global_head_dim": 24,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "sliding_window": WINDOW,
        "layer_types": MIXED,
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0,
        "tie_word_embeddings": True,
        "final_logit_softcapping": 8.0,
    },
    "gemma4_shared": {
        "model_type": "gemma4_text",
        "head_dim": 16,
        "global_head_dim": 24,
        "num_hidden_layers": 7,
        "sliding_window": WINDOW,
        "layer_types": _SHARED,
        "num_kv_shared_layers": 4,
        "hidden_size_per_layer_input": 6,
        "vocab_size_per_layer_input": VOCAB,
        "use_double_wide_mlp": True,
        "tie_word_embeddings": True,
        "final_logit_softcapping": 8.0,
    },
    "gemma4_unified": {
        "model_type": "gemma4_unified_text",
        "head_dim": 16,
        "global_head_dim": 24,
        "sliding_window": WINDOW,
        "layer_types": MIXED,
        "num_kv_shared_layers": 2,
        "tie_word_embeddings": True,
    },
    "gemma3n": {
        "model_type": "gemma3n_text",
        "head_dim": 16,
        "num_hidden_layers": 7,
        "sliding_window": WINDOW,
        "layer_types": _SHARED,
        "num_kv_shared_layers": 4,
        "hidden_size_per_layer_input": 6,
        "vocab_size_per_layer_input": VOCAB - 10,
        "laurel_rank": 4,
        "altup_num_inputs": 3,
        "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0, 0.0, 0.0, 0.0],
        "tie_word_embeddings": True,
        "final_logit_softcapping": 8.0,
    },
}
"""Attention that differs from layer to layer in more than its window."""
_LINEAR: Final = ["linear_attention", "linear_attention", "full_attention", "linear_attention", "full_attention"]
_DELTA: Final[dict[str, Any]] = {
    "layer_types": _LINEAR,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "linear_conv_kernel_dim": 4,
}
_MAMBA: Final[dict[str, Any]] = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 6,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}

RECURRENT: Final[dict[str, dict[str, Any]]] = {
    "qwen3_next": {"model_type": "qwen3_next", "head_dim": 16, **_DELTA, **SHARED_EXPERTS},
    "qwen3_5": {"model_type": "qwen3_5_text", "head_dim": 16, **_DELTA},
    "qwen3_5_moe": {"model_type": "qwen3_5_moe_text", "head_dim": 16, **_DELTA, **SHARED_EXPERTS},
    "olmo_hybrid": {"model_type": "olmo_hybrid", **_DELTA, "linear_num_key_heads": 4},
    "kimi_linear": {
        "model_type": "kimi_linear",
        "layer_types": _LINEAR,
        "mlp_layer_types": ["dense", "sparse", "dense", "sparse", "dense"],
        "linear_num_heads": 2,
        "linear_head_dim": 8,
        **LATENT_KEYS,
        **EXPERTS,
        "num_experts_per_token": 2,
    },
    "lfm2": {"model_type": "lfm2", "layer_types": ["conv", "conv", "full_attention", "conv", "full_attention"]},
    "lfm2_moe": {
        "model_type": "lfm2_moe",
        "layer_types": ["conv", "conv", "full_attention", "conv", "full_attention"],
        "num_dense_layers": 2,
        **SHARED_EXPERTS,
    },
    "bamba": {"model_type": "bamba", "attn_layer_indices": [2, 4], **_MAMBA},
    "granitemoehybrid": {
        "model_type": "granitemoehybrid",
        "layer_types": _LINEAR,
        "position_embedding_type": "rope",
        "embedding_multiplier": 3.0,
        "logits_scaling": 2.0,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 24,
        **_MAMBA,
    },
    "nemotron_h": {
        "model_type": "nemotron_h",
        "layers_block_type": ["linear_attention", "moe", "full_attention", "linear_attention", "mlp"],
        "head_dim": 8,
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "ssm_state_size": 6,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "moe_intermediate_size": 24,
        "moe_shared_expert_intermediate_size": 24,
    },
    "falcon_h1": {"model_type": "falcon_h1", "mamba_d_ssm": 64, **_MAMBA, "ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 0.7]},
}
"""Architectures some of whose layers carry a state from token to token."""

_QWEN_TOWER: Final[dict[str, Any]] = {
    "depth": 1,
    "hidden_size": 16,
    "num_heads": 2,
    "intermediate_size": 16,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
}
_TOWER: Final[dict[str, Any]] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
WRAPPERS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "qwen3_5": ("qwen3_5", _QWEN_TOWER),
    "qwen3_5_moe": ("qwen3_5_moe", _QWEN_TOWER),
    "gemma3": ("gemma3", _TOWER),
    "mistral3": ("mistral", {**_TOWER, "model_type": "pixtral"}),
    "llama4": ("llama4", {**_TOWER, "vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16}),
    "gemma4": ("gemma4_shared", {**_TOWER, "head_dim": 8, "num_key_value_heads": 2}),
    "gemma4_unified": (
        "gemma4_unified",
        {"mm_embed_dim": 16, "output_proj_dims": 16, "patch_size": 4, "pooling_kernel_size": 1, "mm_posemb_size": 4},
    ),
}
"""Multimodal architectures: that of the text part, and what to make of the vision tower."""


def settings_of(architecture: str) -> dict[str, Any]:
    """Return the configuration fields of an architecture named above, or of a relative."""
    return {**_COMMON, **(ARCHITECTURES | FURTHER | RECURRENT | UNUSUAL | RELATIVES)[architecture]}


def make_wrapper(folder: Path, kind: str, max_shard_size: str = "5GB") -> Path:
    """Write a random multimodal checkpoint, one of ``WRAPPERS``, into ``folder``."""
    text, tower = WRAPPERS[kind]
    settings = settings_of(text)
    tied = bool(settings["tie_word_embeddings"])
    config = AutoConfig.for_model(kind, text_config=settings, vision_config=tower, tie_word_embeddings=tied)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        model = AutoModelForImageTextToText.from_config(config)
        _widen(model)
    with _no_progress_bars():
        model.save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def make_checkpoint(
    folder: Path,
    architecture: str = "llama",
    *,
    seed: int = 0,
    max_shard_size: str = "5GB",
    tokenizer: bool = False,
    **overrides: Any,
) -> Path:
    """Write a random checkpoint of an architecture named above into ``folder``; ``overrides`` go into its config.

    With ``tokenizer`` a byte-level tokenizer is saved beside it, and the vocabulary grows to hold every byte. The files
    are the caller's own: copies of those that this process has made before, where it has.
    """
    vocabulary = {"vocab_size": BYTE_VOCAB} if tokenizer else {}
    settings = {**settings_of(architecture), **vocabulary, **overrides}
    key = hashlib.sha256(repr((sorted(settings.items()), seed, max_shard_size, tokenizer)).encode()).hexdigest()
    made = Path(_made.name) / key
    if not made.is_dir():
        _make(made.with_suffix(".unfinished"), settings, seed, max_shard_size, tokenizer).rename(made)
    shutil.copytree(made, folder, copy_function=shutil.copyfile, dirs_exist_ok=True)
    return folder


def _make(folder: Path, settings: dict[str, Any], seed: int, max_shard_size: str, tokenizer: bool) -> Path:
    shutil.rmtree(folder, ignore_errors=True)  # of a failure before
    config = AutoConfig.for_model(**settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
        _widen(model)
        if config.dtype is not None:
            model.to(config.dtype)
    with _no_progress_bars():
        model.save_pretrained(folder, max_shard_size=max_shard_size)
    if tokenizer:
        make_tokenizer(folder)
    return folder


def make_tokenizer(folder: Path) -> None:
    """A tokenizer of ``BYTE_VOCAB`` tokens: three special ones, then one per byte."""
    tokens = ["<s>", "</s>", "<pad>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocab = {token: i for i, token in enumerate(tokens)}
    inner = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    wrapped.save_pretrained(folder)


def _widen(model: torch.nn.Module) -> None:
    """Norms, biases and sinks start at 1 or 0, where forgetting one would not be noticed.

    Embeddings are made small, or the last token would outweigh all that attention brings and the text repeat itself.
    """
    model.get_input_embeddings().weight.data.mul_(0.1)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1 or "sinks" in name:
            parameter.data.add_(torch.randn_like(parameter) * 0.2)


@contextlib.contextmanager
def _no_progress_bars() -> Iterator[None]:
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.enable_progress_bar()
