"""Which GGUF files can be run here: those of which every entry about the model is understood."""

from __future__ import annotations

from typing import Any, Final

from transformers.integrations import GGUF_CONFIG_MAPPING

from penstock.core import ConfigError
from penstock.files import problem_in, shown
from penstock.models.gguf.header import Header
from penstock.models.gguf.purpose import check_purpose

GIVEN: Final = {
    "attention.key_length",
    "attention.value_length",
    "attention.sliding_window",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.attn_factor",
    "rope.scaling.original_context_length",
}
"""Of the entries about the model, what ``config`` takes over where transformers does not."""

SILENT: Final = {"vocab_size", "tensor_data_layout", "rope.scaling.finetuned"}
"""Entries about the model that change no number: the embedding's rows are the vocabulary's size."""


def check_accepted(header: Header) -> None:
    """Raise ConfigError unless the file holds a whole language model of which every entry is understood."""
    check_purpose(header)
    check_understood(header)


def check_understood(header: Header) -> None:
    """Raise ConfigError for an entry about the model that nobody here takes into account: ids might differ by it."""
    mapped = {key for key, name in GGUF_CONFIG_MAPPING[header.architecture].items() if name is not None}
    for key in header.entries:
        name = key.removeprefix(f"{header.architecture}.")
        if name == key or name in mapped | GIVEN | SILENT:
            continue
        value = header.value(key)
        if value or header.count(key):
            raise problem_in(header.path, key, f"is {shown(value)}, which cannot be taken into account here")


def contradiction(header: Header, name: str, problem: str) -> ConfigError:
    """The error that refuses an entry about the model."""
    return problem_in(header.path, f"{header.architecture}.{name}", problem)


def number(header: Header, name: str, kind: type = int) -> Any:
    """An entry about the model, None where there is none. Raises ConfigError unless it is of this kind."""
    key = f"{header.architecture}.{name}"
    value = header.value(key)
    if key in header.entries and type(value) is not kind:
        wanted = "a whole number" if kind is int else "a number with a fraction"
        raise contradiction(header, name, f"is {shown(value)}; it has to be {wanted}")
    return value
