"""Hidden states as raw bytes and back."""

from __future__ import annotations

from typing import Any

import torch

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def to_bytes(hidden_ND: Any) -> memoryview:
    """The tensor's own bytes, row after row, from the CPU or a GPU."""
    flat = hidden_ND.detach().to("cpu").contiguous().view(torch.uint8)
    return memoryview(flat.numpy().reshape(-1))


def from_bytes(frame: bytes, rows: int, width: int, dtype: str, device: str) -> Any:
    """The hidden states [rows, width] that ``frame`` holds; its size has been checked."""
    return torch.frombuffer(bytearray(frame), dtype=DTYPES[dtype]).view(rows, width).to(device)
