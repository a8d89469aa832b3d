"""Hidden states as raw bytes and back, and the core of a stage whose neighbours are other processes."""

from __future__ import annotations

import math
from typing import Any

import torch

from penstock.files import torch_dtype
from penstock.messages import Batch, Cancel, Features, Frame
from penstock.stage.driver import Core, Processed
from penstock.stage.visibility import ProtocolError


def to_bytes(hidden_ND: Any) -> memoryview:
    """The bytes of the hidden states [N, D], row after row, copied from the device if they are not on the CPU."""
    flat = hidden_ND.detach().to("cpu").contiguous().view(torch.uint8)
    return memoryview(flat.numpy().reshape(-1))


def from_bytes(frame: Frame, rows: int, width: int, dtype: str, device: str) -> Any:
    """The hidden states [rows, width] in ``frame``, whose size has been checked. A bytearray is used without a copy."""
    own = frame if isinstance(frame, bytearray) else bytearray(frame)
    return torch.frombuffer(own, dtype=torch_dtype(dtype)).view(rows, width).to(device)


def check_finite(hidden_ND: torch.Tensor, batch: Batch) -> None:
    """Raise ProtocolError where the states of a batch's surviving rows hold a NaN or an infinity."""
    # Neither of them can leave a sum: a finite one, which costs a thirtieth of ``isfinite``, shows that there is none.
    if math.isfinite(hidden_ND.sum(dtype=torch.float32)):
        return
    # A sum of finite numbers may overflow.
    finite_N = torch.isfinite(hidden_ND).all(dim=-1)
    broken = [batch.rows.nodes[row] for row, good in zip(batch.alive, finite_N.tolist(), strict=True) if not good]
    if broken:
        raise ProtocolError(f"stream {batch.stream}: the states of nodes {broken} are not finite")


class FramedCore:
    """A core between other processes: hidden states come and go as frames, whose sizes have been checked.

    Packing and unpacking count as computing, so that a batch can leave at its moment without further work.
    """

    def __init__(self, core: Core, dtype: str, device: str) -> None:
        self._core = core
        self._dtype, self._device = dtype, device
        self.is_last = core.is_last

    def cancel(self, message: Cancel) -> None:
        self._core.cancel(message)

    def missing_features(self, batch: Batch) -> set[tuple[int, int]]:
        return self._core.missing_features(batch)

    def add_features(self, features: Features, states: Any) -> None:
        """Add features that a stage of the target sent; its dtype may differ from this stage's."""
        if states is not None:
            states = from_bytes(states, len(features.nodes), features.width, features.dtype, self._device)
            states = states.to(torch_dtype(self._dtype))
        self._core.add_features(features, states)

    def process(self, batch: Batch, hidden: Any) -> Processed:
        if hidden is not None:
            hidden = from_bytes(hidden, len(batch.alive), batch.width, batch.dtype, "cpu")
            # A row's NaN would stay in the arenas and poison the sums of other requests that mask its slot.
            check_finite(hidden, batch)
            hidden = hidden.to(self._device)
        rows, hidden, picks, candidates = self._core.process(batch, hidden)
        return rows, None if hidden is None else to_bytes(hidden), picks, candidates

    def tapped(self) -> tuple[Features, Any] | None:
        tapped = self._core.tapped()
        if tapped is None:
            return None
        features, states = tapped
        return features, to_bytes(states)
