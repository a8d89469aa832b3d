"""Chooses the formats of weights and hidden states for this processor, where the user leaves that open."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Final

from penstock.config import FieldError
from penstock.dtypes import EXACT, torch_dtype
from penstock.models.checkpoint import Checkpoint
from penstock.models.quantization.floats import can_pack
from penstock.models.quantization.pack import usable
from penstock.models.quantization.whole import works

INSTRUCTIONS: Final = "instructions (AVX2, FMA and F16C, or those of 64-bit ARM)"

Capability = tuple[int, int]
"""A GPU's compute capability: major, minor."""
HAS_BFLOAT16: Final = (8, 0)
"""The least compute capability (Ampere) with instructions for bfloat16."""

EXPERTS: Final = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Fields of a configuration that say that a row has experts to choose from."""

log = logging.getLogger(__name__)


def usable_dtype(
    asked: str, device: str, checkpoint: Checkpoint, quantization: str, capabilities: Iterable[Capability] = ()
) -> str:
    """The dtype ``asked`` for ("auto": the checkpoint's), if the device computes well in it; else float32.

    No CPU does in float16, which is used there only if asked for by name. With quantised weights ``auto`` is float32:
    half precision would make nothing faster, and a row's bits would depend on other rows. On GPUs ``auto`` has 16 bits,
    as ``half_dtype`` says; ``capabilities`` are those of them that are known.
    """
    if device != "cpu":
        return half_dtype(asked, checkpoint, min(capabilities, default=None))
    if asked == "auto" and quantization != "none":
        return "float32"
    dtype = checkpoint.dtype if asked == "auto" else asked
    packed = dtype == "bfloat16" and can_pack(torch_dtype(dtype))
    if dtype == "float32" or packed or asked == "float16":
        return dtype
    whose = "the checkpoint's dtype" if asked == "auto" else "dtype"
    log.warning(
        f"{whose} is {dtype}, for which this processor has no instructions: float32 is used instead, because {dtype} "
        "would take several times as long here"
    )
    return "float32"


def half_dtype(asked: str, checkpoint: Checkpoint, least: Capability | None) -> str:
    """The dtype for GPUs, of which the oldest has the compute capability ``least`` (None: not known).

    "auto" is the checkpoint's own format if that has 16 bits, else bfloat16; float16 where a GPU lacks bfloat16.
    """
    dtype = asked
    if asked == "auto":
        dtype = "float16" if checkpoint.dtype == "float16" else "bfloat16"
    if dtype != "bfloat16" or least is None or least >= HAS_BFLOAT16:
        return dtype
    lacking = f"a GPU of compute capability {least[0]}.{least[1]} has no instructions for bfloat16"
    if asked == "auto":
        log.warning(f"{lacking}: float16 is used instead, in which some models' numbers grow too large")
        return "float16"
    log.warning(f"{lacking}: dtype float16 is faster there")
    return dtype


def weights_format(quantization: str, device: str, checkpoint: Checkpoint, field: str = "quantization") -> str:
    """The format of a target's or draft model's weights, "none" for floats; resolves ``quantization`` "auto".

    On GPUs whole numbers are held, too, so that a file takes what it says, and become floats at every step
    (``quantization.sliced``); experts, which are no linear layers, are floats there. Raises FieldError, which names
    ``field``, for a format that this processor lacks.
    """
    if quantization == "auto":
        routes = any(getattr(checkpoint.config, name, None) for name in EXPERTS)
        return "none" if routes and device != "cpu" else kept(checkpoint.weights.bits, device)
    check_computed(field, quantization, device)
    return quantization


def drafter_format(quantization: str, device: str, dtype: str, *, emulated: bool) -> str:
    """The format of the weights of a learned drafter's module, which computes in ``dtype``.

    int8 costs it next to no hits and takes a quarter of the time to read. On ``emulated`` devices its time is modelled,
    so that nothing would be gained. Raises FieldError like ``weights_format``.
    """
    if quantization == "auto":
        gains = device == "cpu" and dtype == "float32" and not emulated
        return "int8" if gains and usable("int8") else "none"
    field = "speculative_config.quantization"
    if quantization != "none" and device != "cpu":
        raise FieldError(
            field, f"is {quantization!r}, which learned drafters have on cpu alone; device is {device!r}: use none"
        )
    check_computed(field, quantization, device)
    return quantization


def check_computed(field: str, quantization: str, device: str) -> None:
    """Raise FieldError for a format that this processor lacks. Other devices compute floats, which they make of any."""
    if device == "cpu" and not usable(quantization):
        raise FieldError(
            field,
            f"is {quantization!r}, for which this processor lacks {INSTRUCTIONS}; use none",
        )


def check_numerics(numerics: str, device: str) -> None:
    """Raise FieldError where nothing can be ``exact``: on another device, or a processor without the instructions."""
    if numerics == EXACT and device != "cpu":
        raise FieldError("numerics", f"is {numerics!r}, which is computed on cpu alone; device is {device!r}: use fast")
    if numerics == EXACT and not works():
        raise FieldError("numerics", f"is {numerics!r}, for which this processor lacks {INSTRUCTIONS}; use fast")


def kept(bits: int | None, device: str) -> str:
    """The format of a file's weights of ``bits`` bits; "none" on a processor that does not compute in it."""
    name = {None: "none", 4: "int4", 8: "int8"}[bits]
    return name if device != "cpu" or usable(name) else "none"
