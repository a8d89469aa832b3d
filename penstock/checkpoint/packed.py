"""Checkpoints with packed weights: the method, and the weights unpacked as they are read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from penstock.checkpoint.packed_formats import (
    FIELD,
    Method,
    Parts,
    Reader,
    awq,
    bitsandbytes,
    compressed_tensors,
    gptq,
    refusal,
)
from penstock.checkpoint.tensors import (
    GroupedWeight,
    Shards,
    StoredTensor,
    Weights,
    bits_of,
    shards_of_stages,
    stored_in,
)
from penstock.core import ConfigError
from penstock.files import problem_in, shown

# -------------------------------------------------------------------------------------------------------------- methods
# The tool that packed a checkpoint's weights, by its configuration. Unsupported ones are refused by name.

METHODS: Final[Mapping[str, Reader]] = {
    "compressed-tensors": compressed_tensors,
    "gptq": gptq,
    "awq": awq,
    "bitsandbytes": bitsandbytes,
}
"""Every method that can be read, by its name in ``quant_method``. A new one is a ``Reader`` and a line here."""


def method_of(table: Mapping[str, Any], file: Path) -> Method | None:
    """The method that packed the weights of the checkpoint with the configuration ``table``; None for plain floats.

    Raises ConfigError, with the name and what to do, for an unsupported method or layout. ``file`` is the
    configuration's, for that error.
    """
    stated = table.get(FIELD)
    if stated is None:
        return None
    if not isinstance(stated, dict):
        raise problem_in(file, FIELD, f"is {shown(stated)}; it has to be a table")
    name = stated.get("quant_method")
    if not isinstance(name, str) or name not in METHODS:
        raise refusal(file, "quant_method", name, tuple(METHODS))
    return METHODS[name](stated, file)


# -------------------------------------------------------------------------------------------------------------- weights
# The weights of a folder with packed ones, under the names that they have as floats.


def packed_tensor(name: str, parts: Parts, method: Method) -> StoredTensor:
    """The weight [out, in] that ``parts`` are unpacked to. Raises ConfigError where they contradict each other."""
    outline = method.outline(parts)

    def grouped() -> GroupedWeight:
        found = method.unpack(parts)
        assert isinstance(found, GroupedWeight)
        return found

    def select(index: Any) -> Tensor:
        found = method.unpack(parts)
        return (found.dequantize() if isinstance(found, GroupedWeight) else found)[index]

    file = next(iter(parts.values())).file
    as_grouped = grouped if outline.is_grouped else None
    return StoredTensor(file, name, outline.shape, "F32", select, as_grouped, outline.bits)


class PackedShards(Weights):
    """The weights of a checkpoint of which ``method`` has packed some."""

    def __init__(self, folder: Path, method: Method) -> None:
        """Raises ConfigError if the folder has no weights, or parts of one are missing or contradict each other."""
        self._plain = Shards(folder)
        found = parts_of(shards_of_stages(folder))
        self._packed = {}
        taken: set[str] = set()
        for layer, parts in packed_layers(found, method).items():
            check_whole(layer, parts, method)
            name = f"{layer}.weight"
            self._packed[name] = packed_tensor(name, parts, method)
            taken.update(part.name for part in parts.values())
        self._others = [name for name in found if name not in taken]

    @property
    def bits(self) -> int | None:
        return bits_of(self._packed.values())

    @property
    def files(self) -> list[Path]:
        return self._plain.files

    def names(self) -> list[str]:
        return [*self._others, *self._packed]

    def slices(self, names: Iterable[str], files: contextlib.ExitStack) -> dict[str, StoredTensor]:
        asked = list(names)
        plain = self._plain.slices([name for name in asked if name not in self._packed], files)
        return {name: self._packed.get(name) or plain[name] for name in asked}


def parts_of(places: Mapping[str, Path]) -> dict[str, StoredTensor]:
    """Name -> tensor, from the shards' headers. Raises ConfigError for one that is not in its shard."""
    found = {}
    for file in sorted(set(places.values())):
        held = {tensor.name: tensor for tensor in stored_in(file)}
        for name in (name for name, place in places.items() if place == file):
            if name not in held:
                raise ConfigError(f"model: the index says that {file.name} holds {name!r}, but it does not")
            found[name] = held[name]
    return found


def packed_layers(found: Mapping[str, StoredTensor], method: Method) -> dict[str, dict[str, StoredTensor]]:
    """Layer -> name of a part -> part, for every layer whose weight is packed."""
    layers: dict[str, dict[str, StoredTensor]] = {}
    for name, part in found.items():
        if (kind := next((kind for kind in method.parts if name.endswith(f".{kind}")), None)) is not None:
            layers.setdefault(name.removesuffix(f".{kind}"), {})[kind] = part
    return {layer: parts for layer, parts in layers.items() if parts.keys() & method.marks}


def check_whole(layer: str, parts: Parts, method: Method) -> None:
    """Raise ConfigError, with the name, if a part of the weight is missing."""
    if missing := sorted(method.needed - parts.keys()):
        some = next(iter(parts.values()))
        raise some.wrong(f"has no {layer}.{missing[0]} beside it: download or save the checkpoint again")
