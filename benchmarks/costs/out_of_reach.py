"""The memory of rows in slots that no later row reaches, and a request's memory without them.

    python -m benchmarks.results --measure out_of_reach    # and python -m benchmarks.costs.out_of_reach only prints it

The memory of one request in bfloat16, computed from the models' configurations. Either a layer keeps the rows of all
tokens, as with prefix caching. Or a layer with a window keeps the last tokens that it sees, and a layer with a state
keeps the state and the tokens that are not yet folded into it. Room for drafts is the same in both and left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final

from benchmarks.shared.benchmark import show
from penstock.models.recurrent import FOLD, row_size

NAME, HOW = "out_of_reach", "Computed from the models' configurations"
CONTEXTS: Final = (8192, 32768)
BYTES: Final = 2
STATE_BYTES: Final = 4
"""Bytes of a number in a state, which is float32 in every format but the exact one of int4."""


@dataclass(frozen=True)
class Kind:
    """A kind of layer: their number, ``row`` bytes per token, ``reach`` tokens that are kept, ``state``
    bytes besides."""

    layers: int
    row: int
    reach: int | None = None
    state: int = 0

    def bytes(self, tokens: int, given_back: bool) -> int:
        rows = min(tokens, self.reach) if given_back and self.reach is not None else tokens
        return self.layers * (rows * self.row + self.state)


def attention(layers: int, heads: int, width: int, window: int | None = None) -> Kind:
    return Kind(layers, 2 * heads * width * BYTES, window)


def delta_nets(layers: int, keys: int, values: int, width: int) -> Kind:
    """Gated delta nets with these numbers of heads of keys and of values."""
    config = SimpleNamespace(
        linear_key_head_dim=width,
        linear_value_head_dim=width,
        linear_num_key_heads=keys,
        linear_num_value_heads=values,
    )
    return Kind(layers, row_size(config).bytes(BYTES, STATE_BYTES), FOLD, values * width * width * STATE_BYTES)


MODELS: Final[dict[str, Sequence[Kind]]] = {
    "Gemma 2 9B": (attention(21, 8, 256), attention(21, 8, 256, 4096)),
    "Gemma 3 4B": (attention(5, 4, 256), attention(29, 4, 256, 1024)),
    "Gemma 3 27B": (attention(10, 16, 128), attention(52, 16, 128, 1024)),
    "gpt-oss-20b": (attention(12, 8, 64), attention(12, 8, 64, 128)),
    "Mistral 7B v0.1": (attention(32, 8, 128, 4096),),
    "Qwen3.5-4B": (attention(8, 4, 256), delta_nets(24, 16, 32, 128)),
    "Qwen3-Next-80B": (attention(12, 2, 256), delta_nets(36, 16, 32, 128)),
}


def measured() -> list[dict[str, Any]]:
    """Bytes of one request by model and context: for every token, and for those within reach."""
    return [
        {
            "model": name,
            "layers": sum(kind.layers for kind in kinds),
            "near": [[kind.layers, kind.reach, bool(kind.state)] for kind in kinds if kind.reach is not None],
            "tokens": tokens,
            "all_bytes": sum(kind.bytes(tokens, given_back=False) for kind in kinds),
            "reach_bytes": sum(kind.bytes(tokens, given_back=True) for kind in kinds),
        }
        for name, kinds in MODELS.items()
        for tokens in CONTEXTS
    ]


if __name__ == "__main__":
    show(measured())
