"""Which formats weights and hidden states have on this processor, where a user leaves that open or asks too much."""

from __future__ import annotations

import logging

from penstock.config import FieldError
from penstock.dtypes import torch_dtype
from penstock.models.checkpoint import Checkpoint
from penstock.models.quantization.floats import can_pack
from penstock.models.quantization.pack import usable

log = logging.getLogger(__name__)


def usable_dtype(asked: str, device: str, checkpoint: Checkpoint, quantization: str) -> str:
    """The format ``asked`` for, or of ``auto`` the checkpoint's, if the device is good at it; else float32.

    A CPU is never good at float16, which is taken there only where it is asked for by name. With weights in whole
    numbers ``auto`` is float32: half precision would make nothing faster, and rows would lose their own bits.
    """
    if asked == "auto" and quantization != "none":
        return "float32"
    dtype = checkpoint.dtype if asked == "auto" else asked
    packed = dtype == "bfloat16" and can_pack(torch_dtype(dtype))
    if device != "cpu" or dtype == "float32" or packed or asked == "float16":
        return dtype
    whose = "the checkpoint's dtype" if asked == "auto" else "dtype"
    log.warning(
        f"{whose} is {dtype}, for which this processor has no instructions: float32 is used instead, because {dtype} "
        "would take several times as long here"
    )
    return "float32"


def weights_format(quantization: str, device: str, checkpoint: Checkpoint, field: str = "quantization") -> str:
    """What ``quantization`` ("auto" among others) comes to for a target or a draft model: none or a format.

    Raises FieldError, which names ``field``, for a format that nothing here computes.
    """
    if quantization == "auto":
        return kept(checkpoint.weights.bits) if device == "cpu" else "none"
    check_computed(field, quantization, device)
    return quantization


def drafter_format(quantization: str, device: str, dtype: str, *, emulated: bool) -> str:
    """The same for a learned drafter's module, which computes in ``dtype``.

    Eight bits cost it next to none of its hits and take a quarter of the time to read. Where devices are ``emulated``
    its time is modelled, so that nothing would be won. Raises FieldError as ``weights_format`` does.
    """
    if quantization == "auto":
        gains = device == "cpu" and dtype == "float32" and not emulated
        return "int8" if gains and usable("int8") else "none"
    check_computed("speculative_config.quantization", quantization, device)
    return quantization


def check_computed(field: str, quantization: str, device: str) -> None:
    """Raise FieldError for a format that nothing here computes."""
    if quantization != "none" and device != "cpu":
        raise FieldError(field, f"is {quantization!r}, which is computed on cpu alone; device is {device!r}: use none")
    if not usable(quantization):
        raise FieldError(
            field,
            f"is {quantization!r}, for which this processor lacks instructions (AVX2, FMA and F16C, or those of 64-bit "
            "ARM); use none",
        )


def kept(bits: int | None) -> str:
    """The format of weights with so many bits, where this processor computes with it."""
    name = {None: "none", 4: "int4", 8: "int8"}[bits]
    return name if usable(name) else "none"
