"""Medusa checkpoints: the numbers of heads and of their layers are derived from the tensors.

Published configurations state a wrong number of heads (2 where the file holds 5), so that number is not read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from penstock.models.checkpoint import Checkpoint
from penstock.models.speculators.base import (
    SpeculatorCheckpoint,
    check_equal,
    check_shapes,
    draft_vocabulary,
    refusal,
)
from penstock.models.speculators.weights import Stored

ORIGINAL: Final = re.compile(r"(\d+)\.(\d+)\.(linear\.)?(weight|bias)")
"""FasterDecoding's names: head, layer, and "linear" except for the last layer, which gives the logits."""

BLOCK: Final = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.weight")
"""vLLM's names, which the modules here use, too."""


MOST_BLOCKS: Final = 10_000
"""Far more blocks than any Medusa has: the names in a file may hold any number."""


def is_medusa(tensors: Mapping[str, Stored]) -> bool:
    return any(BLOCK.fullmatch(name) for name in _renamed(tensors))


def parse_medusa(
    path: Path, config: Mapping[str, Any], tensors: Mapping[str, Stored], target: Checkpoint
) -> SpeculatorCheckpoint:
    """Parse either layout of Medusa. Raises FieldError if it does not fit ``target``."""
    tensors = _renamed(tensors)
    found = [match.groups() for match in map(BLOCK.fullmatch, tensors) if match]
    heads, layers = (1 + max(int(pair[i]) for pair in found) for i in (0, 1))
    if heads * layers > MOST_BLOCKS:
        raise refusal(path, f"its tensors are numbered as of {heads} heads of {layers} layers; it holds {len(found)}")
    check_equal(path, "hidden_size", config.get("hidden_size"), target.hidden_size, "the target's")
    check_equal(path, "vocab_size", config.get("vocab_size"), target.vocab_size, "the target's")
    width = target.hidden_size
    draft_vocab = tensors["lm_heads.0.weight"].shape[0] if "lm_heads.0.weight" in tensors else target.vocab_size
    check_equal(path, "truncated_vocab_size", config.get("truncated_vocab_size"), draft_vocab, "its heads'")
    needed: dict[str, Any] = {f"lm_heads.{head}.weight": (draft_vocab, width) for head in range(heads)}
    names = [f"blocks.{head}.layers.{layer}" for head in range(heads) for layer in range(layers)]
    needed |= {f"{name}.weight": (width, width) for name in names}
    if "blocks.0.layers.0.bias" in tensors:
        needed |= {f"{name}.bias": (width,) for name in names}
    needed |= draft_vocabulary(path, tensors, "token_map", draft_vocab, target)
    used = check_shapes(path, tensors, needed, {})
    return SpeculatorCheckpoint(
        "medusa", path, (target.num_layers,), width, draft_vocab, used, heads=heads, layers=layers
    )


def _renamed(tensors: Mapping[str, Stored]) -> dict[str, Stored]:
    return {_name(name): stored for name, stored in tensors.items()}


def _name(name: str) -> str:
    match = ORIGINAL.fullmatch(name)
    if match is None:
        return name
    head, layer, linear, what = match.groups()
    return f"blocks.{head}.layers.{layer}.{what}" if linear else f"lm_heads.{head}.{what}"
