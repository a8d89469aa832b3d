"""Families that are near those of ``tests/checkpoints.py``: settings of small random checkpoints.

``python -m benchmarks.strategies.families`` compares them all; CI those of ``OWN_WAYS`` alone, each of which does
something that no other architecture here does.
"""

from __future__ import annotations

from typing import Any, Final

WINDOW: Final = 6
MIXED: Final = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"]
_WINDOWS: Final[dict[str, Any]] = {"sliding_window": WINDOW, "layer_types": MIXED}
LATENT_KEYS: Final[dict[str, Any]] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}
LATENT: Final[dict[str, Any]] = {"q_lora_rank": 16, **LATENT_KEYS}
EXPERTS: Final[dict[str, Any]] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
ROUTED: Final[dict[str, Any]] = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_group": 2,
    "topk_group": 1,
}
SHARED_EXPERTS: Final[dict[str, Any]] = {**EXPERTS, "shared_expert_intermediate_size": 24}
_WIDE: Final[dict[str, Any]] = {"head_dim": 16}
_BY_SECTIONS: Final[dict[str, Any]] = {"rope_type": "default", "mrope_section": [2, 1, 1]}

_SETTINGS: Final[dict[str, dict[str, Any]]] = {
    "afmoe": {**_WIDE, **_WINDOWS, **EXPERTS},
    "apertus": {},
    "arcee": _WIDE,
    "aria_text": {**_WIDE, "moe_num_experts": 4, "moe_topk": 2},
    "axk1": {**LATENT, **ROUTED},
    "beam": {**_WIDE, **_WINDOWS, **EXPERTS, "n_group": 2, "topk_group": 1},
    "cohere": {},
    "cohere2": _WINDOWS,
    "cohere2_moe": {**_WIDE, **_WINDOWS, "num_experts": 4, "num_experts_per_tok": 2},
    "cohere_compass_text": {
        **_WINDOWS,
        "num_key_value_heads": 2,
        "rope_parameters": {
            "sliding_attention": {**_BY_SECTIONS, "rope_theta": 10000.0},
            "full_attention": {**_BY_SECTIONS, "rope_theta": 50000.0},
        },
    },
    "cwm": {**_WIDE, **_WINDOWS},
    "deepseek_v2": {**LATENT, **ROUTED, "first_k_dense_replace": 2},
    "dots1": {**ROUTED, **_WINDOWS},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 24},
    "exaone_moe": {**EXPERTS, **_WINDOWS, "n_group": 2, "topk_group": 1},
    "flex_olmo": {"num_experts": 4, "num_experts_per_tok": 2},
    "flint": {**_WIDE, **_WINDOWS, **SHARED_EXPERTS},
    "gemma": _WIDE,
    "glm": _WIDE,
    "glm4": _WIDE,
    "glm4_moe_lite": {**LATENT, **ROUTED},
    "granite_swa": _WINDOWS,
    "helium": {"head_dim": 8},
    "hy_v3": {**_WIDE, **EXPERTS},
    "hyperclovax": _WIDE,
    "internlm3": _WIDE,
    "iquestcoder": _WIDE,
    "jais2": _WIDE,
    "kolibri1": {**_WIDE, **_WINDOWS, **SHARED_EXPERTS},
    "laguna": {**_WIDE, **_WINDOWS, **SHARED_EXPERTS},
    "mellum": {**_WIDE, **_WINDOWS, **EXPERTS},
    "mimo_v2_flash": {
        **_WIDE,
        **_WINDOWS,
        **ROUTED,
        "num_key_value_heads": 1,
        "v_head_dim": 10,
        "mlp_layer_types": ["dense", "sparse", "sparse", "dense", "sparse"],
    },
    "minicpm3": {**LATENT, "scale_emb": 3.0, "dim_model_base": 16},
    "ministral": {**_WIDE, **_WINDOWS},
    "ministral3": _WIDE,
    "olmo": {"clip_qkv": 0.5},
    "olmo3": _WINDOWS,
    "qwen2_moe": SHARED_EXPERTS,
    "qwen3_moe": EXPERTS,
    "seed_oss": _WIDE,
    "solar_open": {**_WIDE, **ROUTED},
    "starcoder2": {},
    "vaultgemma": {**_WIDE, **_WINDOWS},
    "youtu": LATENT,
}

RELATIVES: Final = {family: {"model_type": family, **settings} for family, settings in _SETTINGS.items()}
OWN_WAYS: Final = ("afmoe", "cohere2", "deepseek_v2", "mimo_v2_flash", "minicpm3", "olmo")
"""A view of what comes of attention, norms over the mean, other rotations, kinds of layer with rotary embeddings and
numbers of heads of their own, factors, keys that are clipped."""
