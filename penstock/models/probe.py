"""Probes of a freshly loaded stage: whether its layers do what a pipeline needs, and its rotary embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from penstock.checkpoint.gate import ATTENTION_TYPES, RECURRENT_TYPES, layer_types, refusal
from penstock.models.attention import Attend

# ---------------------------------------------------------------------------------------------------------------- probe
# Tests what an architecture really does while one row runs through a freshly loaded stage.
#
# The gate judges by configuration. This test finds what a configuration does not tell, and what would give wrong tokens
# without any error: a mask of its own, a window that the attention is not told about, changed embeddings.

HANDLED: Final = frozenset({"scaling", "sliding_window", "softcap", "s_aux"})
HARMLESS: Final = frozenset({"position_ids", "cache_position", "position_embeddings", "joint"})


@dataclass(frozen=True)
class _Call:
    layer: int
    window: int | None
    problem: str


class ProbedAttention:
    """Records the attention calls of one forward pass while answering them."""

    def __init__(self, attention: Attend) -> None:
        self.attention = attention
        self.calls: list[_Call] = []

    def __call__(self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Tensor:
        causal = {"is_causal": getattr(module, "is_causal", True), **options}
        self.calls.append(_Call(module.layer_idx, options.get("sliding_window"), problem_of(mask, causal)))
        return self.attention(module, query, key, value, mask, **options)

    def chosen(self, modules: Sequence[Any], sliding_window: int | None) -> Any:
        """See ``attention.chosen``."""
        self.calls += [_Call(module.layer_idx, sliding_window, "") for module in modules]
        answering: Any = self.attention
        return answering.chosen(modules, sliding_window)


def problem_of(mask: Any, options: dict[str, Any]) -> str:
    """Why an attention call cannot be answered here; empty if it can."""
    if mask is not None:
        return "it brings its own attention mask"
    if options.get("is_causal") is False:
        return "its attention is not causal"
    strange = {name for name, value in options.items() if isinstance(value, Tensor)} - HANDLED - HARMLESS
    return f"its attention takes {', '.join(sorted(strange))}, which is not understood" if strange else ""


def check_calls(config: Any, first: int, last: int, probed: ProbedAttention) -> None:
    """Raise ConfigError unless every attending layer of [first, last) made exactly one call that can be answered."""
    calls, types = probed.calls, layer_types(config)
    attending = [layer for layer in range(first, last) if not types or types[layer] in ATTENTION_TYPES]
    if [call.layer for call in calls] != attending:
        raise refusal(config, "not every layer attends exactly once")
    for call in calls:
        if call.problem:
            raise refusal(config, call.problem)
        if types and (types[call.layer] == "sliding_attention") != (call.window is not None):
            raise refusal(config, f"layer {call.layer} is {types[call.layer]}, but its window is {call.window}")


def check_mixers(config: Any, first: int, last: int, calls: Sequence[int]) -> None:
    """Raise ConfigError unless every state-carrying layer of [first, last) ran exactly once (``calls``)."""
    carrying = [kind for kind in layer_types(config)[first:last] if kind in RECURRENT_TYPES]
    if list(calls) != [1] * len(carrying):
        raise refusal(config, "not every layer that carries a state does so exactly once")


def check_entry(config: Any, given_ND: Tensor, entered: Tensor | None) -> None:
    """Raise ConfigError unless the first layer of a later stage got exactly what the stage before had sent."""
    if entered is None or not torch.equal(given_ND, entered.reshape(given_ND.shape)):
        raise refusal(config, "it changes the hidden states before its first layer")


# ----------------------------------------------------------------------------------------------------------------- rope
# Pins rotary embeddings whose frequencies depend on the length of a text to the longest text allowed.

LENGTH_DEPENDENT: Final = frozenset({"longrope", "dynamic"})


def rope_kinds(config: Any) -> set[str]:
    """The kinds of rotary embedding in a model: one, or one for each layer type."""
    rope = getattr(config, "rope_parameters", None) or {}
    entries = [rope] if "rope_type" in rope else [entry for entry in rope.values() if isinstance(entry, dict)]
    return {str(entry.get("rope_type", "default")) for entry in entries}


def pin_rope(base: Any, config: Any, max_model_len: int | None) -> None:
    """Fix the frequencies of ``base`` to those of a text of ``max_model_len`` tokens, if they depend on its length.

    transformers chooses them by the largest position in the batch, so that one long request would change its
    neighbours' keys. Raises ConfigError in that case if ``max_model_len`` is not given.
    """
    kinds = rope_kinds(config) & LENGTH_DEPENDENT
    if not kinds:
        return
    if max_model_len is None:
        raise refusal(config, f"its {', '.join(sorted(kinds))} rope depends on the longest request: set max_model_len")
    for module in base.modules():
        if isinstance(getattr(module, "rope_type", None), str):
            # A call with the last position lets transformers choose; the new type keeps it from choosing again.
            device = module.inv_freq.device
            module(torch.zeros(1, device=device), torch.tensor([[max_model_len - 1]], device=device))
            module.rope_type = "pinned"
        elif hasattr(module, "rope_type"):
            raise refusal(config, "its rope depends on the longest request, and differs from layer to layer")
