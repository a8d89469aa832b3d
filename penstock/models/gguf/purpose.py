"""The purpose and architecture of a GGUF file. Files that hold no language model are refused by what they are."""

from __future__ import annotations

from typing import Final

from penstock.core import ConfigError
from penstock.files import printable, problem_in, shown
from penstock.models.gguf.header import Header

SUPPORTED: Final = ("llama", "qwen2", "qwen3", "gemma2", "gemma3", "phi3")
"""Architectures under the names that files have for them: llama.cpp writes mistral as llama."""

PURPOSES: Final = {
    "adapter": "a LoRA adapter; merge it into its model first (llama-export-lora) and give the merged file",
    "mmproj": "the vision or audio part of a multimodal model; give the file of its language model",
    "imatrix": "statistics for quantising a model; give the model's file",
    "vocab": "a vocabulary without weights; give the model's file",
}
"""``general.type`` of files that hold no language model -> what they are."""

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
"""Architectures that are no decoders -> what they are."""


def check_purpose(header: Header) -> None:
    """Raise ConfigError unless the file claims to be one whole language model of a supported architecture."""
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


def refusal(header: Header, reason: str) -> ConfigError:
    return ConfigError(f"model: {printable(str(header.path))} is {reason}")
