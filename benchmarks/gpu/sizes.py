"""Sizes of everything that ``benchmarks.gpu`` measures: the real ones, and tiny ones for tests and a first look."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

Config = Mapping[str, Any]
"""The fields of a model's configuration, as ``transformers.AutoConfig.for_model`` takes them."""

_LLAMA: Final = {"model_type": "llama", "vocab_size": 128256, "num_key_value_heads": 8, "rms_norm_eps": 1e-5}
_QWEN: Final = {"model_type": "qwen3", "vocab_size": 151936, "num_key_value_heads": 8, "head_dim": 128}
_ENDS: Final = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "max_position_embeddings": 16384}

MODELS: Final[Mapping[str, Config]] = {
    "Qwen3-0.6B": {
        **_QWEN,
        **_ENDS,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "Llama-3.1-8B": {
        **_LLAMA,
        **_ENDS,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
    "Qwen3-8B": {
        **_QWEN,
        **_ENDS,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
    "Llama-3.1-70B, 20 layers": {
        **_LLAMA,
        **_ENDS,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 20,
        "num_attention_heads": 64,
        "tie_word_embeddings": False,
    },
}
_TINY: Final = {
    **_ENDS,
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}
TINY_MODELS: Final[Mapping[str, Config]] = {
    "tiny Qwen3": {**_TINY, "model_type": "qwen3", "head_dim": 16},
    "tiny Llama": {**_TINY, "model_type": "llama"},
}


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The models that are measured, and how much of everything."""

    models: Mapping[str, Config]
    mains: tuple[str, ...]
    """Names of the models, the best first, of which the largest that fits serves all parts but ``steps``."""
    read_bytes: int
    """Bytes that are read to find a device's bandwidth."""
    square: int
    """Rows and columns of the matrices whose product shows a device's arithmetic."""
    rows: tuple[int, ...]
    contexts: tuple[int, ...]
    repeats: int
    prompt: int
    pieces: tuple[int, ...]
    requests: tuple[int, ...]
    tokens: int
    """Tokens of each answer."""
    stages: tuple[int, ...]
    transports: tuple[str, ...]
    architectures: int
    """Number of small random checkpoints with which all strategies are compared."""
    families: int
    """Number of small random checkpoints that are compared in all formats."""
    drafters: tuple[str, ...]
    """Drafters of the demo pair that are compared."""
    prompts: int
    """Number of prompts whose answers are compared, at most two."""
    compared: int
    """Tokens of each answer that is compared."""


FULL: Final = Sizes(
    models=MODELS,
    mains=("Llama-3.1-8B", "Qwen3-0.6B"),
    read_bytes=4 << 30,
    square=8192,
    rows=(1, 2, 4, 8, 16, 32, 64),
    contexts=(0, 512, 2048, 8192),
    repeats=9,
    prompt=4096,
    pieces=(128, 512, 2048),
    requests=(1, 8, 32),
    tokens=48,
    stages=(1, 2, 4),
    transports=("ipc", "tcp"),
    architectures=1,
    families=1000,
    drafters=("draft_model", "eagle3", "spd", "ngram"),
    prompts=2,
    compared=12,
)
TINY: Final = Sizes(
    models=TINY_MODELS,
    mains=("tiny Llama",),
    read_bytes=16 << 20,
    square=512,
    rows=(1, 4),
    contexts=(0, 64),
    repeats=2,
    prompt=64,
    pieces=(32,),
    requests=(1, 2),
    tokens=8,
    stages=(1, 2),
    transports=("ipc",),
    architectures=1,
    families=1,
    drafters=("draft_model",),
    prompts=1,
    compared=4,
)


def sizes_of(options: argparse.Namespace) -> Sizes:
    return TINY if options.tiny else FULL
