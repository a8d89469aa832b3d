"""The supported architectures: which checkpoints can be split into stages, and what rows carry between layers."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any, Final

from penstock.checkpoint.look import WRAPPED, WRAPPERS
from penstock.core import ConfigError

# --------------------------------------------------------------------------------------------------------------- layout
# The layout of what a row carries from one layer to the next, derived from the configuration alone.
#
# Gemma 3n and 4 have layers near the end that read keys and values of an earlier one ("shared KV"), and layers that get
# an embedding of their own for every token, projected together with the token's ordinary one ("per-layer embeddings").
# Where a stage ends between such layers, both travel on beside the hidden states:
#
#     [ hidden states | the token's embedding | keys and values of the sliding layer | those of the full one ]
#
# The per-layer embeddings themselves do not travel: every stage looks up its own layers' columns by the token.

CARRYING: Final = frozenset({"gemma3n_text", "gemma4_text", "gemma4_unified_text"})
"""Model types that are known to carry these, and nothing else."""
HIDDEN: Final = "hidden"
EMBEDDED: Final = "embedded"
"""Names of the pieces that are no keys and values, whose names are their layers' kinds."""
OUTSIDE: Final = ("embed_tokens_per_layer", "per_layer_model_projection", "per_layer_projection_norm")
"""Modules outside of the layers that every stage has a part of."""

Pieces = dict[str, tuple[int, ...]]
"""Name of a piece -> its shape, in the order in which the pieces lie in a row."""


@dataclass(frozen=True)
class SharedLayer:
    """A layer whose keys and values, ``heads`` of ``width``, are also read by later layers of its ``kind``."""

    kind: str
    layer: int
    last_reader: int
    heads: int
    width: int


def carries(config: Any) -> bool:
    """Whether rows of this model carry more than hidden states."""
    return config.model_type in CARRYING and (bool(shared_layers(config)) or per_layer_width(config) > 0)


def per_layer_width(config: Any) -> int:
    """How many numbers a token's embedding for one layer has; 0 if there are none."""
    return int(getattr(config, "hidden_size_per_layer_input", None) or 0)


def streams(config: Any) -> int:
    """How many hidden states a row has: several in Gemma 3n (alternating updates, arXiv 2301.13310), else 1."""
    return int(getattr(config, "altup_num_inputs", 1))


def readers(config: Any) -> range:
    """The layers without keys and values of their own."""
    layers = int(config.num_hidden_layers)
    return range(layers - int(getattr(config, "num_kv_shared_layers", None) or 0), layers)


def made_by(config: Any) -> dict[int, int]:
    """Layer without keys and values of its own -> the layer whose keys and values it reads."""
    return {
        reader: shared.layer
        for shared in shared_layers(config)
        for reader in readers(config)
        if config.layer_types[reader] == shared.kind
    }


def shared_layers(config: Any) -> list[SharedLayer]:
    """The layers whose keys and values later ones read: the last of each kind that has its own."""
    types, sharing = list(getattr(config, "layer_types", None) or ()), readers(config)
    found = []
    for kind in sorted({types[reader] for reader in sharing}):
        layer = max(index for index in range(sharing.start) if types[index] == kind)
        last_reader = max(reader for reader in sharing if types[reader] == kind)
        own = config.per_layer_config[layer] if hasattr(config, "per_layer_config") else config
        found.append(SharedLayer(kind, layer, last_reader, int(own.num_key_value_heads), int(own.head_dim)))
    return found


def pieces_before(config: Any, layer: int) -> Pieces:
    """The pieces that a row carries as it enters ``layer``; for the number of layers, as it leaves the last one."""
    behind = layer == config.num_hidden_layers
    pieces: Pieces = {HIDDEN: (1 if behind else streams(config), int(config.hidden_size))}
    if per_layer_width(config) and not behind:
        pieces[EMBEDDED] = (int(config.hidden_size),)
    for shared in shared_layers(config):
        # Keys and values travel from the layer behind their own to their last reader.
        if shared.layer < layer <= shared.last_reader:
            pieces[shared.kind] = (2, shared.heads, shared.width)
    return pieces


def row_width(config: Any, layer: int) -> int:
    """How many numbers a row carries as it enters ``layer``."""
    if not carries(config):
        return int(config.hidden_size)
    return sum(prod(shape) for shape in pieces_before(config, layer).values())


def is_outside(name: str) -> bool:
    """Whether a tensor of the checkpoint belongs to one of ``OUTSIDE``."""
    return any(part in OUTSIDE for part in name.split("."))


# ----------------------------------------------------------------------------------------------------------------- gate
# Decides from the configuration alone whether Penstock runs a checkpoint, and why not if it does not.

ATTENTION_TYPES: Final = frozenset({"full_attention", "sliding_attention", "chunked_attention", "hybrid"})
"""Layer types that attend; Falcon-H1's hybrid layers carry a state beside that."""
RECURRENT_TYPES: Final = frozenset({"linear_attention", "conv", "hybrid"})
"""Layer types that carry a state; hybrid ones attend as well."""
OTHER_TYPES: Final = frozenset({"mlp", "moe"})
"""Nemotron-H's layers that consist of a feed-forward network."""
PLAIN_TYPES: Final = frozenset({"full_attention", "sliding_attention"})
"""The layer types that any architecture may have."""
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
"""Fields that only the architectures of ``models/carried.py`` may set."""

WHOLE: Final = "it is a multimodal wrapper; save its language model as a checkpoint of its own"
REFUSING: Final = " is not supported: "


@dataclass(frozen=True)
class ModuleNames:
    """The names of a causal language model's parts: ``base`` inside the model, the other three inside the base.

    ``returned`` is the length of the tuple that each layer returns; 0 if a layer returns only hidden states.
    """

    base: str
    embed: str
    layers: str
    norm: str
    returned: int = 0


RECURRENT: Final[dict[str, ModuleNames]] = {
    "qwen3_next": ModuleNames("model", "embed_tokens", "layers", "norm"),
    "qwen3_5_text": ModuleNames("model", "embed_tokens", "layers", "norm"),
    "qwen3_5_moe_text": ModuleNames("model", "embed_tokens", "layers", "norm"),
    "olmo_hybrid": ModuleNames("model", "embed_tokens", "layers", "norm"),
    "kimi_linear": ModuleNames("model", "embed_tokens", "layers", "norm"),
    "lfm2": ModuleNames("model", "embed_tokens", "layers", "embedding_norm"),
    "lfm2_moe": ModuleNames("model", "embed_tokens", "layers", "embedding_norm"),
    "bamba": ModuleNames("model", "embed_tokens", "layers", "final_layernorm", returned=2),
    "granitemoehybrid": ModuleNames("model", "embed_tokens", "layers", "norm"),
    "nemotron_h": ModuleNames("model", "embeddings", "layers", "norm_f"),
    "falcon_h1": ModuleNames("model", "embed_tokens", "layers", "final_layernorm", returned=1),
}
"""Model type -> parts, for architectures whose state-carrying layers ``models/mixers.py`` computes in a tree.

For some of them transformers does not claim that another attention can be plugged in; loading a stage tests it.
"""
CHUNKED: Final[dict[str, ModuleNames]] = {"llama4_text": ModuleNames("model", "embed_tokens", "layers", "norm")}
"""Model type -> parts, for architectures whose attention ``models/attention.py`` handles."""


def model_class(config: Any) -> Any:
    """The transformers class of this configuration. Raises ConfigError if it is no causal language model."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    if getattr(config, "is_encoder_decoder", False):
        raise refusal(config, "an encoder-decoder has no single stack of layers to split")
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise refusal(config, "transformers has no causal language model for it")
    return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]


def text_config(config: Any) -> Any:
    """The configuration of a multimodal model's text part, completed from the whole one; else ``config`` itself.

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


def check_supported(config: Any) -> ModuleNames:
    """The parts of this architecture. Raises ConfigError with the reason if it cannot be split."""
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
    # Taken from the class, since a configuration file may set any attribute of an instance.
    plan = getattr(type(config), "base_model_pp_plan", None)
    if not plan:
        raise refusal(config, "transformers has no pipeline plan for it")
    if type(config).sub_configs:
        raise refusal(config, WHOLE)
    if not cls._supports_attention_backend:
        raise refusal(config, "transformers cannot plug another attention into it")
    return _read_plan(cls, config, plan)


def layer_types(config: Any) -> list[str]:
    """The type of every layer; empty where all are alike."""
    return list(getattr(config, "layer_types", None) or ())


def _read_plan(cls: Any, config: Any, plan: dict[str, Any]) -> ModuleNames:
    """The parts by transformers' pipeline plan, which maps a module to its inputs and outputs.

    Raises ConfigError for a plan of another form.
    """
    names = list(plan)
    embed = [name for name in names if plan[name][0] == ["input_ids"]]
    dropouts = {name for name in names if name.endswith("dropout")}
    norm = [name for name in names if name not in (*embed, *dropouts, "layers")]
    if len(embed) != 1 or len(norm) != 1 or "layers" not in names:
        raise refusal(config, f"its pipeline plan is not embedding, layers, norm but {', '.join(names)}")
    return ModuleNames(base=cls.base_model_prefix, embed=embed[0], layers="layers", norm=norm[0])


def _why_not(inner: Any) -> str:
    """Why a multimodal model with this text part is refused: the text part may not be supported either."""
    try:
        check_supported(inner)
    except ConfigError as error:
        return f"neither is its text part {inner.model_type!r}: {reason_of(error)}"
    return WHOLE


def refusal(config: Any, reason: str) -> ConfigError:
    """The error that refuses an architecture by name."""
    return ConfigError(f"model: architecture {config.model_type!r}{REFUSING}{reason}")


def reason_of(error: ConfigError) -> str:
    """The reason that ``refusal`` was given."""
    return str(error).partition(REFUSING)[2]
