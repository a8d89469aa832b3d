"""The number formats of weights and hidden states, under the names that options, messages and checkpoints use."""

from __future__ import annotations

from typing import Any, Final

from penstock.core import ConfigError

DTYPE_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Each format that a model can compute in, with the size of one number."""
DTYPES: Final = ("auto", *DTYPE_BYTES)
"""Values of the option ``dtype``: auto is the checkpoint's own format, where the device is good at it."""
QUANTIZATIONS: Final = ("auto", "none", "int8", "int4")
"""Values of the option ``quantization``: the form in which weights are held."""

AUTO, EXACT, FAST, REFERENCE = "auto", "exact", "fast", "reference"
NUMERICS: Final = (AUTO, EXACT, FAST)
"""Values of the option ``numerics``: whether a row's bits depend on nothing but what it sees.

auto is exact where a model's layers can have that, else fast. REFERENCE, transformers' own modules without any of ours,
is for tests and no option.
"""
PROMISES: Final = {
    EXACT: "a text depends on no drafts, stages or other requests, to the last bit.",
    FAST: "where two tokens are nearly tied, rounding may decide by what is computed together.",
}
"""Promises about texts, by how layers compute them."""


def torch_dtype(name: str) -> Any:
    """torch's own object for a format. Raises ConfigError for an unknown one."""
    import torch

    if name not in DTYPE_BYTES:
        raise ConfigError(f"dtype is {name!r}; it has to be one of {', '.join(DTYPE_BYTES)}")
    return getattr(torch, name)
