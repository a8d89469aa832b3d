"""Which checkpoints Penstock runs, told from their configuration alone, and the reason for those that it refuses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from penstock.core import ConfigError
from penstock.models.carried.layout import CARRYING
from penstock.models.text_part import WRAPPED, WRAPPERS

ATTENTION_TYPES: Final = frozenset({"full_attention", "sliding_attention", "chunked_attention", "hybrid"})
"""Layer types that attend; Falcon-H1's hybrid ones carry a state beside it."""
RECURRENT_TYPES: Final = frozenset({"linear_attention", "conv", "hybrid"})
"""Layer types that carry a state, or do both."""
OTHER_TYPES: Final = frozenset({"mlp", "moe"})
"""Nemotron-H's layers that are a feed-forward and nothing else."""
PLAIN_TYPES: Final = frozenset({"full_attention", "sliding_attention"})
"""Those of which any architecture may have some."""
REFUSED: Final = {
    "deepseek_v4": "its attention reads compressed blocks of keys and values",
    "minimax_m3": "its attention selects blocks of keys",
    "hrm_text": "it runs its layers several times",
    "longcat_flash": "its layers hold two attentions each",
    "doge": "it brings its own attention mask",
}
"""Architectures that look like any other decoder but are not, by the beginning of their model type."""
REFUSED_FIELDS: Final = {
    "num_kv_shared_layers": "its layers share keys and values with each other",
    "hidden_size_per_layer_input": "its layers take per-layer embeddings",
}
"""What ``models/carried/`` knows of some architectures, and nobody of others."""

WHOLE: Final = "it is a multimodal wrapper; save its language model as a checkpoint of its own"
REFUSING: Final = " is not supported: "


@dataclass(frozen=True)
class Parts:
    """Where a causal language model keeps its parts: ``base`` inside the model, the other three inside the base.

    ``returned`` says how long a tuple each of its layers returns; 0 if they return hidden states alone.
    """

    base: str
    embed: str
    layers: str
    norm: str
    returned: int = 0


RECURRENT: Final[dict[str, Parts]] = {
    "qwen3_next": Parts("model", "embed_tokens", "layers", "norm"),
    "qwen3_5_text": Parts("model", "embed_tokens", "layers", "norm"),
    "qwen3_5_moe_text": Parts("model", "embed_tokens", "layers", "norm"),
    "olmo_hybrid": Parts("model", "embed_tokens", "layers", "norm"),
    "kimi_linear": Parts("model", "embed_tokens", "layers", "norm"),
    "lfm2": Parts("model", "embed_tokens", "layers", "embedding_norm"),
    "lfm2_moe": Parts("model", "embed_tokens", "layers", "embedding_norm"),
    "bamba": Parts("model", "embed_tokens", "layers", "final_layernorm", returned=2),
    "granitemoehybrid": Parts("model", "embed_tokens", "layers", "norm"),
    "nemotron_h": Parts("model", "embeddings", "layers", "norm_f"),
    "falcon_h1": Parts("model", "embed_tokens", "layers", "final_layernorm", returned=1),
}
"""By model type, the architectures with layers that ``models/recurrent/`` computes in a tree.

transformers claims no other attention for some of them; that they have it is found out when a stage is loaded."""
CHUNKED: Final[dict[str, Parts]] = {"llama4_text": Parts("model", "embed_tokens", "layers", "norm")}
"""By model type, the architectures whose attention ``models/chunked.py`` knows."""


def model_class(config: Any) -> Any:
    """The transformers class of this configuration. Raises ConfigError if it is no causal language model."""
    if getattr(config, "is_encoder_decoder", False):
        raise refusal(config, "an encoder-decoder has no single stack of layers to split")
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise refusal(config, "transformers has no causal language model for it")
    return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]


def text_config(config: Any) -> Any:
    """The configuration of the text part of a multimodal model, which says some things in its place; or ``config``.

    Raises ConfigError for a multimodal model whose text part is not known to be a model by itself.
    """
    if WRAPPED not in type(config).sub_configs:
        return config
    inner = config.text_config
    if config.model_type not in WRAPPERS:
        raise refusal(config, _why_not(inner))
    inner.tie_word_embeddings = bool(config.tie_word_embeddings)
    for name in ("dtype", "eos_token_id", "bos_token_id", "pad_token_id"):
        if getattr(config, name, None) is not None:
            setattr(inner, name, getattr(config, name))
    return inner


def check_supported(config: Any) -> Parts:
    """Say where the parts of this architecture are. Raises ConfigError naming the reason why it cannot be split."""
    cls = model_class(config)
    for beginning, reason in REFUSED.items():
        if config.model_type.startswith(beginning):
            raise refusal(config, reason)
    for field, reason in REFUSED_FIELDS.items():
        if config.model_type not in CARRYING and getattr(config, field, None):
            raise refusal(config, reason)
    if getattr(config, "use_bidirectional_attention", None) in (True, "all"):
        raise refusal(config, "use_bidirectional_attention is set, and its attention is not causal")
    parts = (RECURRENT | CHUNKED).get(config.model_type)
    known = ATTENTION_TYPES | RECURRENT_TYPES | OTHER_TYPES if parts else PLAIN_TYPES
    if unknown := sorted(set(layer_types(config)) - known):
        raise refusal(config, f"its layers of type {', '.join(unknown)} are not computed in a tree of tokens")
    if parts:
        return parts
    if WRAPPED in type(config).sub_configs:
        raise refusal(config, WHOLE)
    # Of the class: a configuration file may set any attribute of an instance.
    plan = getattr(type(config), "base_model_pp_plan", None)
    if not plan:
        raise refusal(config, "transformers has no pipeline plan for it")
    if type(config).sub_configs:
        raise refusal(config, WHOLE)
    if not cls._supports_attention_backend:
        raise refusal(config, "transformers cannot plug another attention into it")
    return _read_plan(cls, config, plan)


def layer_types(config: Any) -> list[str]:
    """The type of every layer; nothing where all are alike."""
    return list(getattr(config, "layer_types", None) or ())


def _read_plan(cls: Any, config: Any, plan: dict[str, Any]) -> Parts:
    names = list(plan)
    embed = [name for name in names if plan[name][0] == ["input_ids"]]
    dropouts = {name for name in names if name.endswith("dropout")}
    norm = [name for name in names if name not in (*embed, *dropouts, "layers")]
    if len(embed) != 1 or len(norm) != 1 or "layers" not in names:
        raise refusal(config, f"its pipeline plan is not embedding, layers, norm but {', '.join(names)}")
    return Parts(base=cls.base_model_prefix, embed=embed[0], layers="layers", norm=norm[0])


def _why_not(inner: Any) -> str:
    """Why a multimodal model with this text part does not run: the text part may not either."""
    try:
        check_supported(inner)
    except ConfigError as error:
        return f"neither is its text part {inner.model_type!r}: {reason_of(error)}"
    return WHOLE


def refusal(config: Any, reason: str) -> ConfigError:
    """The error that refuses an architecture by name."""
    return ConfigError(f"model: architecture {config.model_type!r}{REFUSING}{reason}")


def reason_of(error: ConfigError) -> str:
    """What ``refusal`` was given."""
    return str(error).partition(REFUSING)[2]
