"""The header of a GGUF file: metadata, arrays, and each tensor's place, all within limits."""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, Final

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from penstock.core import ConfigError
from penstock.files import MOST_SPLITS, SPLIT_NAME, printable, problem_in, shown, split_files

# --------------------------------------------------------------------------------------------------------------- header
# The header of a GGUF file: its metadata, and the place of each tensor. Everything is checked before it is used.
#
# ```
# "GGUF" | version | tensors | entries | key, type, value ... | name, shape, type, offset ... | padding | tensor data
# ```
#
# Layout: ggml's docs/gguf.md, versions 2 and 3, little-endian.

MAGIC: Final = b"GGUF"
VERSIONS: Final = (2, 3)
"""Versions of GGUF that are read. Version 1 has counts of 32 bits."""
SCALARS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Type of a value -> its format in ``struct``."""
LENGTH: Final = struct.Struct("<Q")
"""The length of a text in an array."""
UINT32: Final = 4
FLOAT32: Final = 6
STRING: Final = 8
ARRAY: Final = 9
"""Numbers of four of the format's types of values."""

SPLIT_NUMBER: Final = "split.no"
SPLIT_COUNT: Final = "split.count"
SPLIT_TENSORS: Final = "split.tensors.count"

LONGEST_NAME: Final = 256
"""Bytes of the longest key and of the longest name of a tensor, for which the format has 64."""
LONGEST_TEXT: Final = 1 << 20
"""Bytes of the longest text. A chat template has thousands."""
MOST_ENTRIES: Final = 1 << 12
"""The most keys of a file. Models have 20 to 60."""
MOST_VALUES: Final = 1 << 22
"""The most values of an array. Vocabularies have up to 300,000 tokens, and twice as many merges."""
MOST_TENSORS: Final = 1 << 17
"""The most tensors of a file. A layer has 9 to 30."""
MOST_DIMENSIONS: Final = 4
"""The most dimensions of a tensor, GGML's own limit."""
LEAST_ALIGNMENT: Final = 8
MOST_ALIGNMENT: Final = 1 << 16
DEFAULT_ALIGNMENT: Final = 32
"""Bytes to whose multiples tensors are aligned: the least, the most, and those of a file that states none. The format
states the least and the default; the most bounds the gaps between tensors."""


REQUANTISE: Final = "quantise the model anew in another format (llama-quantize)"


@dataclass(frozen=True)
class Entry:
    """One entry of the metadata: the bytes [start, end) of the file that hold key, type and value; and the value."""

    start: int
    end: int
    value: Any
    """The value as Python has it; None for an array, whose values are read when they are needed."""
    count: int | None = None
    """The number of an array's values; None if it is no array."""


@dataclass(frozen=True)
class TensorInfo:
    """A tensor's place in its file, in bytes, and its format. ``shape`` is in torch's order."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    start: int
    nbytes: int
    file: Path
    """The file that holds it: a model may be split over several."""


@dataclass(frozen=True)
class Header:
    """A checked header.

    ``data_start`` is where it ends. Every tensor lies behind it, within its file, and apart from others.

    For a model that is split over several files, ``path`` and the entries are the first one's, the tensors all files'.
    """

    path: Path
    entries: dict[str, Entry]
    tensors: dict[str, TensorInfo]
    data_start: int

    @property
    def architecture(self) -> str:
        return str(self.value("general.architecture"))

    def value(self, key: str, default: Any = None) -> Any:
        """The value of an entry that is no array, or ``default`` where there is no such entry."""
        return self.entries[key].value if key in self.entries else default

    def count(self, key: str) -> int:
        """The number of an array's values; 0 where there is no such array."""
        return (self.entries[key].count or 0) if key in self.entries else 0

    def bytes(self) -> bytes:
        """The bytes of the header."""
        with self.path.open("rb") as file:
            return file.read(self.data_start)


def read_header(path: Path) -> Header:
    """Read and check the header of a GGUF file, and those of the other files of a split model.

    Raises ConfigError for anything that no sound file holds, for a file that is not the first of several, and for a
    missing one.
    """
    first = read_one(path)
    count = first.value(SPLIT_COUNT, 1)
    if count in (0, 1):
        return first
    files = files_of(first, count)
    tensors = dict(first.tensors)
    for number, file in enumerate(files[1:], 1):
        part = read_one(file)
        if (part.value(SPLIT_NUMBER), part.value(SPLIT_COUNT)) != (number, count):
            raise problem_in(file, SPLIT_NUMBER, f"is {shown(part.value(SPLIT_NUMBER))}, not {number}: another model's")
        if twice := tensors.keys() & part.tensors.keys():
            raise problem_in(file, min(twice), f"is in {path.name} as well")
        tensors |= part.tensors
    if len(tensors) != first.value(SPLIT_TENSORS, len(tensors)):
        raise problem_in(path, SPLIT_TENSORS, f"is {first.value(SPLIT_TENSORS)}; its files hold {len(tensors)}")
    return Header(path, first.entries, tensors, first.data_start)


def files_of(first: Header, count: object) -> list[Path]:
    """The files that a model is split over, under llama.cpp's names. Raises ConfigError if one is missing."""
    if type(count) is not int or not 1 < count <= MOST_SPLITS:
        raise problem_in(first.path, SPLIT_COUNT, f"is {shown(count)}; there may be 1 to {MOST_SPLITS} files")
    named = SPLIT_NAME.fullmatch(first.path.name)
    if named is None or int(named[3]) != count:
        wanted = f"NAME-00001-of-{count:05d}.gguf"
        raise problem_in(first.path, SPLIT_COUNT, f"is {count}; the first of so many files is called {wanted}")
    files = split_files(first.path.with_name(f"{named[1]}-00001-of-{named[3]}.gguf"))
    if first.value(SPLIT_NUMBER) != 0 or int(named[2]) != 1:
        raise ConfigError(f"model: {first.path} is not the first of {count} files; give {files[0]}")
    for file in files:
        if not file.is_file():
            raise ConfigError(f"model: {file} is missing, one of the {count} files of this model: download it again")
    return files


def read_one(path: Path) -> Header:
    """The header of one file."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            if not size:
                raise ConfigError(f"model: {path} is empty")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
                return _Cursor(path, mapped, size).header()
    except OSError as error:
        raise ConfigError(f"model: {path} cannot be read: {error.strerror}") from error


class _Cursor:
    """Reads on from ``at``, never beyond the end of the file."""

    def __init__(self, path: Path, data: mmap.mmap, size: int) -> None:
        self.path = path
        self.data = data
        self.size = size
        self.at = 0

    def header(self) -> Header:
        if self.take(4, "magic number") != MAGIC:
            raise ConfigError(f"model: {self.path} is no GGUF file: it does not begin with {MAGIC.decode()}")
        version = self.number("I", "version")
        if version not in VERSIONS:
            big = version & 0xFFFF == 0
            remedy = "it is big-endian; convert it with gguf_convert_endian.py of the gguf package"
            raise self.problem("version", f"is {version}: {remedy if big else 'versions 2 and 3 can be read'}")
        tensors = self.bounded(self.number("Q", "tensor count"), MOST_TENSORS, "tensor count")
        entries = self.entries(self.bounded(self.number("Q", "entry count"), MOST_ENTRIES, "entry count"))
        alignment = self.alignment(entries)
        infos = [self.tensor_info() for _ in range(tensors)]
        # The end of the tensor table, rounded up to the alignment.
        data_start = -(-self.at // alignment) * alignment
        placed = {info.name: self.placed(info, data_start, alignment) for info in infos}
        if len(placed) < tensors:
            raise self.problem("tensors", "name one of them twice")
        self.check_apart(list(placed.values()))
        return Header(self.path, entries, placed, data_start)

    # ------------------------------------------------------------------------------------------------- metadata

    def entries(self, count: int) -> dict[str, Entry]:
        found: dict[str, Entry] = {}
        for _ in range(count):
            start = self.at
            key = self.text(LONGEST_NAME, "a key")
            if key in found:
                raise self.problem(key, "is there twice")
            kind = self.number("I", key)
            if kind == ARRAY:
                values = self.array(key)
                found[key] = Entry(start, self.at, None, values)
            else:
                value = self.text(LONGEST_TEXT, key) if kind == STRING else self.scalar(kind, key)
                found[key] = Entry(start, self.at, value)
        return found

    def scalar(self, kind: int, key: str) -> Any:
        if kind not in SCALARS:
            raise self.problem(key, f"is of type {kind}, which there is not")
        return self.number(SCALARS[kind], key)

    def array(self, key: str) -> int:
        """Skip an array. Returns the number of its values."""
        kind, count = self.number("I", key), self.bounded(self.number("Q", key), MOST_VALUES, key)
        if kind == STRING:
            self.pass_texts(count, key)
        elif kind in SCALARS:
            self.take(count * struct.calcsize(f"<{SCALARS[kind]}"), key)
        else:
            raise self.problem(key, f"is an array of type {kind}, which cannot be read")
        return count

    def pass_texts(self, count: int, key: str) -> None:
        """Skip an array's texts without copying them: a vocabulary has hundreds of thousands."""
        at, last = self.at, self.size - LENGTH.size
        for _ in range(count):
            if at > last:
                raise self.cut_off(key)
            (length,) = LENGTH.unpack_from(self.data, at)
            if length > LONGEST_TEXT:
                raise self.too_many(length, LONGEST_TEXT, key)
            at += LENGTH.size + length
        if at > self.size:
            raise self.cut_off(key)
        self.at = at

    def alignment(self, entries: dict[str, Entry]) -> int:
        """The number of bytes of which every tensor's offset is a multiple."""
        entry = entries.get("general.alignment")
        found = entry.value if entry is not None else DEFAULT_ALIGNMENT
        if not isinstance(found, int) or not LEAST_ALIGNMENT <= found <= MOST_ALIGNMENT or found & (found - 1):
            raise self.problem("general.alignment", f"is {shown(found)}; it has to be a power of two, 8 or above")
        return int(found)

    # -------------------------------------------------------------------------------------------------- tensors

    def tensor_info(self) -> TensorInfo:
        """One line of the tensor table; ``start`` still counts from the end of the header."""
        name = self.text(LONGEST_NAME, "a tensor's name")
        dimensions = self.bounded(self.number("I", name), MOST_DIMENSIONS, f"{name}: the number of dimensions")
        # GGUF lists the axis whose numbers are neighbours first, torch last.
        shape = tuple(reversed([self.number("Q", name) for _ in range(dimensions)]))
        kind, start = self.number("I", name), self.number("Q", name)
        if not shape or 0 in shape:
            raise self.problem(name, f"has the shape {list(shape)}; a tensor has at least one number")
        try:
            known = GGMLQuantizationType(kind)
        except ValueError:
            raise self.problem(name, f"is stored as type {kind}, which is not known here: {REQUANTISE}") from None
        per_block, block_bytes = GGML_QUANT_SIZES[known]
        if shape[-1] % per_block:
            raise self.problem(name, f"has rows of {shape[-1]} numbers; {known.name} stores {per_block} together")
        return TensorInfo(name, shape, known, start, prod(shape) // per_block * block_bytes, self.path)

    def placed(self, info: TensorInfo, data_start: int, alignment: int) -> TensorInfo:
        if info.start % alignment:
            raise self.problem(info.name, f"begins at {info.start}, which is no multiple of {alignment}")
        if data_start + info.start + info.nbytes > self.size:
            raise self.problem(info.name, "ends behind the end of the file: download it again")
        return replace(info, start=data_start + info.start)

    def check_apart(self, tensors: list[TensorInfo]) -> None:
        """Raise ConfigError if tensors overlap: with the same bytes a small file could describe a large model."""
        end = 0
        for info in sorted(tensors, key=lambda info: info.start):
            if info.start < end:
                raise self.problem(info.name, "lies within another tensor")
            end = info.start + info.nbytes

    # --------------------------------------------------------------------------------------------------- reading

    def take(self, length: int, what: str) -> bytes:
        if length > self.size - self.at:
            raise self.cut_off(what)
        found = self.data[self.at : self.at + length]
        self.at += length
        return found

    def number(self, kind: str, what: str) -> Any:
        kind = f"<{kind}"
        (found,) = struct.unpack(kind, self.take(struct.calcsize(kind), what))
        return found

    def text(self, most: int, what: str) -> str:
        raw = self.take(self.bounded(self.number("Q", what), most, f"{what}: the length"), what)
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise self.problem(what, f"is no UTF-8: {error}") from error

    def bounded(self, count: int, most: int, what: str) -> int:
        if count > most:
            raise self.too_many(count, most, what)
        return int(count)

    def too_many(self, count: int, most: int, what: str) -> ConfigError:
        return self.problem(what, f"is {count}; there may be at most {most}")

    def cut_off(self, what: str) -> ConfigError:
        return self.problem(what, "is cut off by the end of the file: download it again")

    def problem(self, what: str, problem: str) -> ConfigError:
        return problem_in(self.path, what, problem)


# -------------------------------------------------------------------------------------------------------------- purpose
# The purpose and architecture of a GGUF file. Files that hold no language model are refused by what they are.

SUPPORTED: Final = ("llama", "qwen2", "qwen3", "gemma2", "gemma3", "phi3")
"""Architectures under the names that files have for them: llama.cpp writes mistral as llama."""

PURPOSES: Final = {
    "adapter": "a LoRA adapter; merge it into its model first (llama-export-lora) and give the merged file",
    "mmproj": "the vision or audio part of a multimodal model; give the file of its language model",
    "imatrix": "statistics for quantising a model; give the model's file",
    "vocab": "a vocabulary without weights; give the model's file",
}
"""``general.type`` of files that hold no language model -> what they are."""

BLOCK_DRAFTER: Final = "dflash"
"""llama.cpp's architecture for block drafters of all kinds: DFlash, DFlash 2 and DSpark."""
FORKED: Final = ("dflash-draft", "dspark")
"""Architectures of block drafters in files that only forks of llama.cpp write and read."""
OTHERS: Final = {
    BLOCK_DRAFTER: "a block drafter; give it as the model of speculative_config, with method dflash or dspark",
    **dict.fromkeys(
        FORKED,
        "a block drafter as forks of llama.cpp write it, under names of their own; convert its checkpoint anew with "
        f"llama.cpp's own converter, which writes the architecture {BLOCK_DRAFTER}, or give that checkpoint",
    ),
    "clip": PURPOSES["mmproj"],
    "controlvector": "a control vector; give the model's file",
    "imatrix": PURPOSES["imatrix"],
    **dict.fromkeys(
        ("bert", "modern-bert", "nomic-bert", "nomic-bert-moe", "neo-bert", "jina-bert-v2", "jina-bert-v3", "eurobert"),
        "an encoder, which writes no text",
    ),
    **dict.fromkeys(("gemma-embedding", "llama-embed", "t5encoder"), "an encoder, which writes no text"),
    "t5": "an encoder with a decoder; only decoders can be split into stages",
}
"""Architectures that are no decoders -> what they are."""


def check_purpose(header: Header) -> None:
    """Raise ConfigError unless the file claims to be one whole language model of a supported architecture."""
    purpose, architecture = header.value("general.type", "model"), header.value("general.architecture")
    if "adapter.type" in header.entries:
        purpose = "adapter"
    if purpose != "model":
        raise refusal(header, PURPOSES.get(str(purpose), f"of type {shown(purpose)}; only models can be run"))
    if architecture not in SUPPORTED:
        if architecture in OTHERS:
            raise refusal(header, OTHERS[architecture])
        raise problem_in(
            header.path,
            "general.architecture",
            f"is {shown(architecture)}; GGUF files of {', '.join(SUPPORTED)} can be read: give the checkpoint that the "
            "file was made of instead",
        )


def refusal(header: Header, reason: str) -> ConfigError:
    """The error that refuses a GGUF file for this reason."""
    return ConfigError(f"model: {printable(str(header.path))} is {reason}")


# --------------------------------------------------------------------------------------------------------------- arrays
# The arrays of a GGUF file's metadata: texts, and numbers of one type.

OF_TEXTS: Final = "a list of texts"
OF_NUMBERS: Final = "a list of numbers"
START: Final = struct.Struct("<IIQ")
"""The beginning of an array: its own type, the type of its values, and their number."""


def texts(header: Header, key: str) -> list[str]:
    """The texts of an array, none where there is no such entry. Raises ConfigError if it holds something else."""
    if key not in header.entries:
        return []
    raw, kind, at = _contents(header, key, OF_TEXTS)
    if kind != STRING:
        raise _wrong(header, key, OF_TEXTS)
    found = []
    for number in range(header.count(key)):
        (length,) = LENGTH.unpack_from(raw, at)
        at += LENGTH.size
        try:
            found.append(raw[at : at + length].decode())
        except UnicodeDecodeError as error:
            raise problem_in(header.path, f"{key}[{number}]", f"is no UTF-8: {error}") from error
        at += length
    return found


def numbers(header: Header, key: str) -> np.ndarray | None:
    """The numbers of an array, None where there is no such entry. Raises ConfigError if it holds something else."""
    if key not in header.entries:
        return None
    raw, kind, at = _contents(header, key, OF_NUMBERS)
    if kind not in SCALARS:
        raise _wrong(header, key, OF_NUMBERS)
    return np.frombuffer(raw, dtype=f"<{SCALARS[kind]}", count=header.count(key), offset=at)


def value_of(header: Header, key: str) -> object:
    """A single value, also where the file has an array of equal values, one for each layer.

    None where there is no such entry, or the values of its array differ.
    """
    if not header.count(key):
        return header.value(key)
    found = numbers(header, key)
    return found[0].item() if found is not None and (found == found[0]).all() else None


def _contents(header: Header, key: str, wanted: str) -> tuple[bytes, int, int]:
    """The bytes of an entry, the type of its array's values, and the offset at which these begin."""
    entry = header.entries[key]
    raw = header.bytes()[entry.start : entry.end]
    at = LENGTH.size + len(key.encode())
    if entry.count is None:
        raise _wrong(header, key, wanted)
    kind, of, _ = START.unpack_from(raw, at)
    assert kind == ARRAY
    return raw, of, at + START.size


def _wrong(header: Header, key: str, wanted: str) -> Exception:
    return problem_in(header.path, key, f"is {shown(header.value(key))}; it has to be {wanted}")
