"""The formats of weights that benchmarks compare, by name, and the options of a stage or an engine that choose them."""

from __future__ import annotations

from typing import Final, TypedDict

from penstock.files import DTYPE_BYTES, EXACT, FAST


class Format(TypedDict):
    dtype: str
    quantization: str
    numerics: str


EXACT_FORMATS: Final[dict[str, Format]] = {
    **{dtype: Format(dtype=dtype, quantization="none", numerics=EXACT) for dtype in DTYPE_BYTES},
    **{name: Format(dtype="float32", quantization=name, numerics=EXACT) for name in ("int8", "int4")},
}
FORMATS: Final[dict[str, Format]] = {
    **EXACT_FORMATS,
    **{f"{dtype}, fast": Format(dtype=dtype, quantization="none", numerics=FAST) for dtype in ("float32", "bfloat16")},
}
