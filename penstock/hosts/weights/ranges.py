"""Which bytes of a checkpoint's files a host needs for the layers that it is to hold."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec

from penstock.core import ConfigError
from penstock.files import CONFIG_FILE, read_json
from penstock.hosts.weights.digest import COUNTED
from penstock.models.text_part import MTP, is_wrapper, text_name

SAFETENSORS: Final = ".safetensors"
PIECE: Final = 1 << 18
"""Bytes that are sent at once: on a slow link, less than a lease takes."""

Range = tuple[int, int]
"""From one byte to before another."""
Layers = tuple[int, int]
"""From one layer to before another."""


class FilePart(msgspec.Struct, frozen=True):
    """What is needed of a file, in ascending order."""

    name: str
    size: int
    ranges: list[Range]


def parts_of(source: Path, layers: Collection[Layers], total: int) -> list[FilePart]:
    """What stages of these ranges of layers read of a checkpoint of so many: its small files, headers, and tensors.

    ``source`` is a folder or a GGUF file. As loading does, a stage at either end of the model has all that is outside
    of the layers. Raises OSError, and ConfigError for a damaged file.
    """
    if source.is_file():
        return [gguf_part(source, layers, total)]
    files = sorted(file for file in source.iterdir() if file.suffix in COUNTED)
    wrapped = is_wrapper(read_json(source / CONFIG_FILE))
    return [
        safetensors_part(file, layers, total, wrapped) if file.suffix == SAFETENSORS else whole(file) for file in files
    ]


def whole(file: Path) -> FilePart:
    size = file.stat().st_size
    return FilePart(file.name, size, [(0, size)] if size else [])


def safetensors_part(file: Path, layers: Collection[Layers], total: int, wrapped: bool = False) -> FilePart:
    """What is needed of one file; of a multimodal checkpoint (``wrapped``) nothing but its text part is."""
    from penstock.models.carried.layout import is_outside
    from penstock.models.shards import layer_of

    def needed(name: str) -> bool:
        if name.startswith(MTP) or (wrapped and text_name(name) is None):
            return False
        return is_needed(layer_of(name), layers, total) or (bool(layers) and is_outside(name))

    with file.open("rb") as opened:
        begin = 8 + int.from_bytes(opened.read(8), "little")
        try:
            header = json.loads(opened.read(begin - 8))
            places = {name: tuple(info["data_offsets"]) for name, info in header.items() if name != "__metadata__"}
        except (ValueError, KeyError, TypeError, MemoryError) as error:
            raise ConfigError(f"model: {file.name} is damaged: {error}; download it again") from error
    wanted = [(begin + start, begin + end) for name, (start, end) in places.items() if needed(name)]
    return FilePart(file.name, file.stat().st_size, merged([(0, begin), *wanted]))


def gguf_part(file: Path, layers: Collection[Layers], total: int) -> FilePart:
    from penstock.models.gguf.header import SPLIT_COUNT, read_header
    from penstock.models.gguf.weights import LAYER

    header = read_header(file)
    if header.value(SPLIT_COUNT, 1) > 1:
        raise ConfigError(
            f"model: {file.name} is one of several files, which are not sent to other hosts: join them with "
            "llama-gguf-split --merge and give the result"
        )
    wanted = [
        (info.start, info.start + info.nbytes)
        for name, info in header.tensors.items()
        if is_needed(int(found[1]) if (found := LAYER.match(name)) else None, layers, total)
    ]
    return FilePart(file.name, file.stat().st_size, merged([(0, header.data_start), *wanted]))


def is_needed(layer: int | None, layers: Collection[Layers], total: int) -> bool:
    """Whether a tensor of this layer, or of none, is read by one of the stages."""
    if layer is None:
        return any(first == 0 or last == total for first, last in layers)
    return any(first <= layer < last for first, last in layers)


def merged(ranges: Sequence[Range]) -> list[Range]:
    """In ascending order, those that touch as one."""
    found: list[Range] = []
    for start, end in sorted(ranges):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        elif end > start:
            found.append((start, end))
    return found


def pieces_of(ranges: Sequence[Range]) -> Iterator[Range]:
    """Cut where a file's bytes are cut for whatever range: what is held of one range serves another."""
    for start, end in ranges:
        while start < end:
            cut = min(end, (start // PIECE + 1) * PIECE)
            yield start, cut
            start = cut
