"""Every format of weights that compiled layers take, and the options of a stage that choose it; some families."""

from __future__ import annotations

from typing import Final

from penstock.files import DTYPE_BYTES, QUANTIZATIONS

WHOLE: Final = {name: {"quantization": name} for name in QUANTIZATIONS if name not in ("auto", "none")}
FLOATS: Final = {name: {"dtype": name} for name in DTYPE_BYTES}
MIXED: Final = {
    f"{name}-{dtype}": {**whole, "dtype": dtype} for name, whole in WHOLE.items() for dtype in ("bfloat16", "float16")
}
"""Weights of whole numbers, whose hidden states, keys and values are of 16 bits."""
FAMILIES: Final = ["llama3_rope", "llama_tied", "mistral_window", "qwen2", "qwen3"]
FORMATS: Final[dict[str, dict[str, str]]] = WHOLE | MIXED | FLOATS
