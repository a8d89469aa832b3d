"""The formats of weights that benchmarks compare, by name, and the options of a stage or an engine that choose them."""

from __future__ import annotations

from typing import Final

from penstock.files import DTYPE_BYTES, EXACT, FAST

EXACT_FORMATS: Final[dict[str, dict[str, str]]] = {
    dtype: {"dtype": dtype, "quantization": "none", "numerics": EXACT} for dtype in DTYPE_BYTES
} | {name: {"dtype": "float32", "quantization": name, "numerics": EXACT} for name in ("int8", "int4")}
FORMATS: Final = EXACT_FORMATS | {
    f"{dtype}, fast": {**EXACT_FORMATS[dtype], "numerics": FAST} for dtype in ("float32", "bfloat16")
}
