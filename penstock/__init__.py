"""Penstock: one language model over several devices as a pipeline, kept full with speculated tokens.

Importing this package does not import torch: ``LLM`` and ``AsyncLLM`` are loaded when they are
first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.core import (
    CompletionOutput,
    ConfigError,
    FinishReason,
    OutlineOutput,
    PenstockError,
    PipelineError,
    QueueFull,
    RequestError,
    RequestOutput,
    SamplingParams,
    StructuredOutputsParams,
)
from penstock.core import __version__ as __version__

if TYPE_CHECKING:
    from penstock.engine.async_llm import AsyncLLM
    from penstock.engine.llm import LLM
    from penstock.engine.replicas.replicas import Replicas

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "ConfigError",
    "FinishReason",
    "OutlineOutput",
    "PenstockError",
    "PipelineError",
    "QueueFull",
    "Replicas",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
]


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from penstock.engine.replicas.offline import LLM  # its module, with that of several engines

        return LLM
    if name == "AsyncLLM":
        from penstock.engine.async_llm import AsyncLLM

        return AsyncLLM
    if name == "Replicas":
        from penstock.engine.replicas.replicas import Replicas

        return Replicas
    raise AttributeError(f"module 'penstock' has no attribute {name!r}")
