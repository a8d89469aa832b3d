"""The file's own whole numbers for linear layers, packed without a second rounding.

A layer's rows may come from several tensors, because layers that read the same input are joined before they are packed:

```
q_proj [q, in]  k_proj [k, in]  v_proj [v, in]   ->   one layer [q + k + v, in] of three ``StoredRows``
```
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from penstock.models.quantization.grouped import GroupedWeight, stacked


class StoredRows(NamedTuple):
    """Consecutive outputs of a linear layer that come from one tensor."""

    outputs: int
    read: Callable[[], GroupedWeight] | None
    """Reads them from the file; None if the file has floats."""


def remember(model: nn.Module, tensors: Mapping[str, Any]) -> None:
    """Note in the linear layers of ``model`` which of ``tensors`` (by name) they were read from."""
    for name, module in model.named_modules():
        tensor = tensors.get(f"{name}.weight")
        if type(module) is nn.Linear and getattr(tensor, "is_grouped", False):
            module.stored = [StoredRows(module.out_features, tensor.grouped)]  # type: ignore[union-attr,assignment]


def stored_rows(linear: nn.Linear) -> list[StoredRows]:
    """The tensors of a layer's outputs, in order."""
    found: list[StoredRows] = getattr(linear, "stored", [StoredRows(linear.weight.shape[0], None)])
    return found


def in_whole_numbers(
    linear: nn.Linear,
    kept: Callable[[GroupedWeight], GroupedWeight | None],
    rounded: Callable[[Tensor], GroupedWeight],
) -> GroupedWeight:
    """A layer's weight: each part as in its file, if ``kept`` finds a form for that, else its floats ``rounded``."""
    parts = []
    stored = stored_rows(linear)
    floats = linear.weight.detach().split([rows.outputs for rows in stored])
    for rows, weight in zip(stored, floats, strict=True):
        own = None if rows.read is None else kept(rows.read())
        parts.append(rounded(weight) if own is None else own)
    return stacked(parts)


def join(whole: nn.Linear, linears: Iterable[nn.Linear]) -> None:
    """Note that ``whole`` has the outputs of ``linears``, one after the other."""
    whole.stored = [rows for linear in linears for rows in stored_rows(linear)]  # type: ignore[assignment]
