"""Which GGUF files are models that can be run here. Others are refused by what they are."""

from __future__ import annotations

from typing import Any, Final

from transformers.integrations import GGUF_CONFIG_MAPPING

from penstock.core import ConfigError
from penstock.foreign_files import printable, problem_in, shown
from penstock.models.gguf.header import Header

SUPPORTED: Final = ("llama", "qwen2", "qwen3", "gemma2", "gemma3", "phi3")
"""As files name them: llama.cpp writes mistral as llama."""

PURPOSES: Final = {
    "adapter": "a LoRA adapter; merge it into its model first (llama-export-lora) and give the merged file",
    "mmproj": "the vision or audio part of a multimodal model; give the file of its language model",
    "imatrix": "statistics for quantising a model; give the model's file",
    "vocab": "a vocabulary without weights; give the model's file",
}
"""What ``general.type`` says of files that hold no language model."""

OTHERS: Final = {
    "clip": PURPOSES["mmproj"],
    "controlvector": "a control vector; give the model's file",
    "imatrix": PURPOSES["imatrix"],
    **dict.fromkeys(
        ("bert", "modern-bert", "nomic-bert", "nomic-bert-moe", "neo-bert", "jina-bert-v2", "jina-bert-v3", "eurobert"),
        "an encoder, which writes no text",
    ),
    **dict.fromkeys(("gemma-embedding", "llama-embed", "t5encoder"), "an encoder, which writes no text"),
    "t5": "an encoder with a decoder; only decoders can be split into stages",
}
"""Architectures that are no decoders."""

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
    purpose, architecture = header.value("general.type", "model"), header.value("general.architecture")
    if "adapter.type" in header.entries:
        purpose = "adapter"
    if purpose != "model":
        raise refusal(header, PURPOSES.get(str(purpose), f"of type {shown(purpose)}; only models can be run"))
    if architecture not in SUPPORTED:
        if architecture in OTHERS:
            raise refusal(header, OTHERS[architecture])
        raise problem_in(
            header.path,
            "general.architecture",
            f"is {shown(architecture)}; GGUF files of {', '.join(SUPPORTED)} can be read: give the checkpoint that the "
            "file was made of instead",
        )
    if header.value("split.count", 1) != 1:
        raise refusal(header, "one of several parts; join them with llama-gguf-split --merge and give the result")
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


def refusal(header: Header, reason: str) -> ConfigError:
    return ConfigError(f"model: {printable(str(header.path))} is {reason}")


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
