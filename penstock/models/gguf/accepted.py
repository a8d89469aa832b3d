"""Decides whether a GGUF file can be run: every entry about the model has to be understood."""

from __future__ import annotations

from typing import Any, Final

from transformers.integrations import GGUF_CONFIG_MAPPING

from penstock.core import ConfigError
from penstock.files import problem_in, shown
from penstock.models.gguf.arrays import value_of
from penstock.models.gguf.header import Header
from penstock.models.gguf.purpose import check_purpose

REMEDY: Final = "give the checkpoint that the file was made of instead"
IMPORTANT: Final = ("tokenizer.ggml.suppress_tokens",)
"""Entries that are not named after the architecture but change what the model says."""
GIVEN: Final = {
    "attention.key_length",
    "attention.value_length",
    "attention.key_length_swa",
    "attention.value_length_swa",
    "attention.scale",
    "attention.sliding_window",
    "attention.sliding_window_pattern",
    "embedding_length_out",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "rope.dimension_count",
    "rope.dimension_count_swa",
    "rope.freq_base",
    "rope.freq_base_swa",
    "rope.scale_linear",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.attn_factor",
    "rope.scaling.original_context_length",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
}
"""Entries about the model that ``config`` takes over because transformers does not."""

NEUTRAL: Final = {
    "attention.causal": (True,),
    "logit_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "embedding_scale": (0.0, 1.0),
    "attention.output_scale": (0.0, 1.0),
    "attention.value_scale": (0.0, 1.0),
    "expert_weights_scale": (0.0, 1.0),
    "rope.scaling.yarn_attn_factor": (1.0,),
    "rope.scaling.yarn_ext_factor": (-1.0,),
}
"""Entry -> values that change nothing, for entries that are not taken into account. See ``NOTHING`` for all others."""
NOTHING: Final = (0, 0.0, False, "", None)

SILENT: Final = {"vocab_size", "tensor_data_layout", "rope.scaling.finetuned"}
"""Entries about the model that change no number: the vocabulary's size is that of the embedding."""


def check_accepted(header: Header) -> None:
    """Raise ConfigError unless the file holds a whole language model of which every entry is understood."""
    check_purpose(header)
    check_understood(header)


def check_understood(header: Header) -> None:
    """Raise ConfigError for an entry about the model that is not taken into account: it might change token ids."""
    mapped = {key for key, name in GGUF_CONFIG_MAPPING[header.architecture].items() if name is not None}
    for key in header.entries:
        name = key.removeprefix(f"{header.architecture}.")
        if (name == key and key not in IMPORTANT) or name in mapped | GIVEN | SILENT:
            continue
        value = value_of(header, key)
        if (value is None and header.count(key)) or value not in NEUTRAL.get(name, NOTHING):
            raise problem_in(header.path, key, f"is {shown(value)}, which cannot be taken into account here: {REMEDY}")


def contradiction(header: Header, name: str, problem: str) -> ConfigError:
    """The error that refuses an entry about the model."""
    return problem_in(header.path, f"{header.architecture}.{name}", problem)


def number(header: Header, name: str, kind: type = int) -> Any:
    """The value of an entry about the model, also of an array of equal values; None where there is none.

    Raises ConfigError unless the value is of this kind.
    """
    key = f"{header.architecture}.{name}"
    value = value_of(header, key)
    if key in header.entries and type(value) is not kind:
        wanted = "a whole number" if kind is int else "a number with a fraction"
        raise contradiction(header, name, f"is {shown(value)}; it has to be {wanted}")
    return value
