"""The text part of a multimodal checkpoint: its tensors, under the names that a language model alone has."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any, Final, Protocol

WRAPPERS: Final = frozenset(
    {"qwen3_5", "qwen3_5_moe", "gemma3", "gemma3n", "mistral3", "llama4", "gemma4", "gemma4_unified"}
)
"""Multimodal architectures whose text part, given only text, computes the same as the whole."""
WRAPPED: Final = "text_config"
"""The field of a multimodal configuration that holds the language model's."""
INSIDE: Final = "language_model"
HEAD: Final = "lm_head"
MTP: Final = "mtp."
"""The prefix of Qwen's MTP heads: weights of drafters (``models/speculators/``), not of stages."""


def is_wrapper(stated: Mapping[str, Any]) -> bool:
    """Whether a configuration file describes a language model inside of another model."""
    model_type = stated.get("model_type")
    return isinstance(model_type, str) and model_type in WRAPPERS and isinstance(stated.get(WRAPPED), dict)


def text_name(name: str) -> str | None:
    """A language model's own name for this tensor; None for tensors of vision or audio towers, projectors and the like.

    Over the years transformers has written ``model.language_model.layers..`` and ``language_model.model.layers..``.
    """
    parts = name.split(".")
    if INSIDE in parts[:2]:
        parts.remove(INSIDE)
        return ".".join(parts)
    return name if parts[0] == HEAD else None


def is_read(stated: Mapping[str, Any], name: str) -> bool:
    """Whether a stage or a drafter may read this tensor of a checkpoint with that configuration file."""
    return not is_wrapper(stated) or text_name(name) is not None or name.startswith(MTP)


class Weights(Protocol):
    """The weights of a checkpoint, however they are stored."""

    @property
    def bits(self) -> int | None: ...

    @property
    def files(self) -> list[Path]: ...

    def names(self) -> list[str]: ...

    def sizes(self) -> dict[str, int]: ...

    def slices(self, names: Iterable[str], files: contextlib.ExitStack) -> dict[str, Any]: ...


class TextPart:
    """The tensors among ``weights`` that belong to the text part. No other is read."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        named = {text_name(stored): stored for stored in weights.names()}
        self._stored = {name: stored for name, stored in named.items() if name is not None}

    @property
    def bits(self) -> int | None:
        return self._weights.bits

    @property
    def files(self) -> list[Path]:
        return self._weights.files

    def names(self) -> list[str]:
        return list(self._stored)

    def sizes(self) -> dict[str, int]:
        """Name -> number of elements, for every tensor."""
        with contextlib.ExitStack() as files:
            return {name: prod(found.get_shape()) for name, found in self.slices(self._stored, files).items()}

    def slices(self, names: Iterable[str], files: contextlib.ExitStack) -> dict[str, Any]:
        """Name -> tensor, not read yet, until ``files`` closes them."""
        wanted = list(names)
        found = self._weights.slices([self._stored[name] for name in wanted], files)
        return {name: found[self._stored[name]] for name in wanted}
