"""The tool that packed a checkpoint's weights, by its configuration. Unsupported ones are refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from penstock.core import ConfigError
from penstock.files import problem_in, shown
from penstock.models.prequantized.awq import AWQ
from penstock.models.prequantized.bitsandbytes import BITSANDBYTES
from penstock.models.prequantized.compressed_tensors import COMPRESSED
from penstock.models.prequantized.gptq import gptq
from penstock.models.prequantized.parts import Method

FIELD: Final = "quantization_config"
METHODS: Final = ("compressed-tensors", "gptq", "awq", "bitsandbytes")
GPTQ_FORMATS: Final = ("gptq", "gptq_v2")
COMPRESSED_FORMATS: Final = ("pack-quantized", "int-quantized", "naive-quantized", "float-quantized")
UNFOLLOWED: Final = ("kv_cache_scheme", "transform_config")
"""Fields of compressed-tensors that change the numbers and are not supported."""
REMEDY: Final = "use a GGUF file, or the float checkpoint with --quantization int8 or int4"


def method_of(table: Mapping[str, Any], file: Path) -> Method | None:
    """The method that packed the weights of the checkpoint with the configuration ``table``; None for plain floats.

    Raises ConfigError, with the name and what to do, for an unsupported method or layout.
    """
    stated = table.get(FIELD)
    if stated is None:
        return None
    if not isinstance(stated, dict):
        raise problem_in(file, FIELD, f"is {shown(stated)}; it has to be a table")
    name = stated.get("quant_method")
    if name not in METHODS:
        raise refusal(file, "quant_method", name, METHODS)
    if name == "gptq":
        layout = stated.get("checkpoint_format", "gptq")
        if layout not in GPTQ_FORMATS:
            raise refusal(file, "checkpoint_format", layout, GPTQ_FORMATS)
        return gptq(first_version=layout == "gptq")
    if name == "awq":
        layout = stated.get("version", "gemm")
        if not isinstance(layout, str) or layout.lower() != "gemm":
            raise refusal(file, "version", layout, ("gemm",))
        return AWQ
    if name == "bitsandbytes":
        return BITSANDBYTES
    check_compressed(stated, file)
    return COMPRESSED


def check_compressed(stated: Mapping[str, Any], file: Path) -> None:
    """Raise ConfigError for a format of compressed-tensors that cannot be read."""
    groups = stated.get("config_groups")
    if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()):
        raise problem_in(file, f"{FIELD}.config_groups", f"is {shown(groups)}; it has to be a table of tables")
    for group in groups.values():
        layout = group.get("format") or stated.get("format")
        if layout not in COMPRESSED_FORMATS:
            raise refusal(file, "format", layout, COMPRESSED_FORMATS)
    for name in UNFOLLOWED:
        if stated.get(name):
            raise problem_in(file, f"{FIELD}.{name}", f"is {shown(stated[name])}, which nothing here does; {REMEDY}")
    sparsity = stated.get("sparsity_config") or {}
    if not isinstance(sparsity, dict) or sparsity.get("format", "dense") != "dense":
        raise refusal(file, "sparsity_config", sparsity, ("dense",))


def refusal(file: Path, field: str, found: object, readable: tuple[str, ...]) -> ConfigError:
    known = ", ".join(readable)
    return problem_in(file, f"{FIELD}.{field}", f"is {shown(found)}; {known} can be read: else {REMEDY}")
