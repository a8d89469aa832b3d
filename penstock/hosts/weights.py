"""Digests of a checkpoint's bytes, and the parts of it that a host needs; the hub as one source of them."""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Annotated, Final, NamedTuple

import httpx
import msgspec

from penstock.checkpoint.look import MTP, is_wrapper, text_name
from penstock.core import ConfigError, from_json
from penstock.files import CONFIG_FILE, read_json, split_files
from penstock.messages import Frame, Index, MalformedMessage

# ------------------------------------------------------------------------------------------------------------- manifest
# Digests of all bytes of a checkpoint, and the part of them that a host needs for the layers that it is to hold.
#
# A file is cut into pieces of ``PIECE`` bytes. The SHA-256 of each piece, one after the other, are the file's digests;
# their own SHA-256 is its root. The digest of a checkpoint is that of its files' names, sizes and roots. A host that
# knows a checkpoint's digest can therefore tell whether a piece belongs to it, wherever the piece comes from:
#
#     digest of the checkpoint <- name, size, root of each file
#                                             root <- digests of the file's pieces <- the pieces
#
# Nobody can put other bytes under a digest. A hole reads as a piece of zeros, which has another digest.

SAFETENSORS: Final = ".safetensors"
COUNTED: Final = (".json", SAFETENSORS, ".gguf", ".model", ".jinja", ".txt")
"""Endings of the files that make up a checkpoint, and are hashed: weights, configurations, tokenizer, chat template."""
PIECE: Final = 1 << 18
"""Bytes of a piece, which is sent as one message: on a slow link (1 Mbit/s) it takes about two seconds."""
DIGEST_BYTES: Final = 32
"""Bytes of a SHA-256 digest."""
SPAN: Final = 64
"""Pieces that a thread hashes at a time. 16 MiB cost far more time than handing them out, and leave a file several
threads' work."""
MOST_THREADS: Final = 4
"""Most threads that hash: more of them would wait for the disk."""
MOST_LISTED: Final = 4096
"""Most files of a checkpoint's folder. Checkpoints have up to a few hundred."""

Range = tuple[int, int]
"""Bytes [first, last) of a file."""
Layers = tuple[Index, Index]
"""Layers [first, last) of a model."""
OUTSIDE: Final = (0, 0)
"""No layer of a model, only the tensors outside of them: embedding, final norm and head."""


class Held(NamedTuple):
    """The part of a model that a host holds for one rank of a stage: the rank's rows of layers [first, last)."""

    first: int
    last: int
    rank: int = 0
    ranks: int = 1
    """Ranks of the stage; 1 holds every row."""
    groups: int = 1
    """Groups of keys and values in each layer, which ranks share whole."""

    @property
    def layers(self) -> Layers:
        return self.first, self.last


Pieces = tuple[Index, Index]
"""Pieces [first, last) of a file."""
Digest = Annotated[str, msgspec.Meta(max_length=64, pattern=r"\A[0-9a-f]{64}\Z")]
"""A SHA-256 digest in hexadecimal."""
FileName = Annotated[str, msgspec.Meta(max_length=255, pattern=r"\A(?!\.{1,2}\Z)[^/\x00]+\Z")]
"""The name of a file in a folder: neither a path nor . or .., so that nothing outside of the folder is opened."""
Size = Annotated[int, msgspec.Meta(ge=0, le=1 << 45)]
"""Bytes of a file, 32 TiB at most."""


class FilePart(msgspec.Struct, frozen=True):
    """A file of a checkpoint, with the ``pieces`` of it that are needed, in ascending order."""

    name: FileName
    size: Size
    root: Digest
    pieces: Annotated[list[Pieces], msgspec.Meta(max_length=1 << 16)] = []

    @property
    def needed(self) -> Iterator[int]:
        """The numbers of the pieces that are needed."""
        return chain.from_iterable(range(first, last) for first, last in self.pieces)

    @property
    def needed_bytes(self) -> int:
        return sum(min(last * PIECE, self.size) - first * PIECE for first, last in self.pieces)


class HashedFile(msgspec.Struct, frozen=True):
    """A file, its ``size`` in bytes, and the digests of its pieces, DIGEST_BYTES each."""

    name: str
    size: int
    digests: bytes

    @property
    def root(self) -> str:
        return hashlib.sha256(self.digests).hexdigest()


class Cancelled(Exception):
    """Raised where hashing stops because its caller wants no result any more."""


def count_of(size: int) -> int:
    """How many pieces a file of ``size`` bytes has."""
    return -(-size // PIECE)


def digest_of(files: Sequence[FilePart]) -> str:
    """The digest of a checkpoint of these files."""
    named = sorted((file.name, file.size, file.root) for file in files)  # in whatever order they were listed
    return hashlib.sha256(msgspec.msgpack.encode(named)).hexdigest()


def digest_at(digests: Frame | memoryview, piece: int) -> bytes:
    """The digest of a piece, out of those of a file's pieces."""
    return bytes(digests[piece * DIGEST_BYTES : (piece + 1) * DIGEST_BYTES])


def check_parts(digest: str, files: Sequence[FilePart], is_folder: bool, digests: Frame) -> None:
    """Raise MalformedMessage unless the digest is that of the files, and ``digests`` are those of their pieces."""
    names = [file.name for file in files]
    if len({*names}) != len(names) or not files:
        raise MalformedMessage("a checkpoint's files are not each named once")
    if not is_folder and not {*names[1:]} <= {file.name for file in split_files(Path(names[0]))}:
        raise MalformedMessage("a checkpoint that is no folder has files that its first one does not name")
    if digest_of(files) != digest:
        raise MalformedMessage("a checkpoint's digest is not that of its files")
    for file in files:
        # Edges that ascend mean that ranges neither overlap nor come out of order.
        edges = [edge for pieces in file.pieces for edge in pieces]
        if (
            edges != sorted(edges)
            or any(first == last for first, last in file.pieces)
            or (edges and edges[-1] > count_of(file.size))
        ):
            raise MalformedMessage(f"pieces of {file.name} overlap, are empty, or lie behind its end")
    split_digests(files, digests)


def split_digests(files: Sequence[FilePart], digests: Frame) -> dict[str, memoryview]:
    """The digests of the pieces of each file that is needed in part or whole, by the file's name.

    Raises MalformedMessage if there are too few or too many, or they do not match a file's root.
    """
    found, start, whole = dict[str, memoryview](), 0, memoryview(digests)
    for file in files:
        if file.pieces:
            end = start + count_of(file.size) * DIGEST_BYTES
            found[file.name] = whole[start:end]
            if len(found[file.name]) != end - start or hashlib.sha256(found[file.name]).hexdigest() != file.root:
                raise MalformedMessage(f"the digests of {file.name} are not those of its root")
            start = end
    if start != len(whole):
        raise MalformedMessage("there are more digests than files that are needed")
    return found


# ------------------------------------------------------------------------------------------------------------ hashing
# Reading and hashing files piece by piece.


def open_regular(name: str | Path, flags: int = os.O_RDONLY, folder: int | None = None) -> int:
    """A descriptor of a regular file, opened without blocking. Raises OSError for anything else.

    Links are followed, since files of the hub's cache are links; callers that write add O_NOFOLLOW.
    """
    # O_NONBLOCK: without it, opening a named pipe would wait for its other end.
    opened = os.open(name, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o600, dir_fd=folder)
    if not stat.S_ISREG(os.fstat(opened).st_mode):
        os.close(opened)
        raise OSError(None, "is not a regular file", str(name))
    return opened


def hashed(source: Path, cancelled: Callable[[], bool] = lambda: False) -> list[HashedFile]:
    """Every file of a checkpoint, a folder or a GGUF file, with its digests.

    Raises OSError, ConfigError for a folder of too many files, and Cancelled.
    """
    return [hashed_file(file, cancelled) for file in files_of(source)]


def files_of(source: Path) -> list[Path]:
    """The files of a checkpoint, sorted by name; for a GGUF model ``source``, then its further files.

    Raises OSError, and ConfigError for a folder of too many files.
    """
    if not source.is_dir():
        return [source, *(file for file in split_files(source)[1:] if file.exists())]
    found = []
    with os.scandir(source) as listing:
        for entry in listing:
            if entry.name.endswith(COUNTED):
                found.append(source / entry.name)
            if len(found) > MOST_LISTED:
                raise ConfigError(f"model: {source} holds more than {MOST_LISTED} files of a checkpoint")
    return sorted(found)


def hashed_file(file: Path, cancelled: Callable[[], bool] = lambda: False) -> HashedFile:
    """A file with the digests of its pieces. Raises OSError, and Cancelled."""
    opened = open_regular(file)
    try:
        size = os.fstat(opened).st_size
        starts = range(0, count_of(size), SPAN)
        apart = ThreadPoolExecutor(min(MOST_THREADS, max(1, len(starts))))
        try:
            found = apart.map(lambda first: digests_of(opened, size, first, first + SPAN, cancelled), starts)
            return HashedFile(file.name, size, b"".join(found))
        finally:
            apart.shutdown(cancel_futures=True)
    finally:
        os.close(opened)


def digests_of(opened: int, size: int, first: int, last: int, cancelled: Callable[[], bool]) -> bytes:
    """The digests of pieces [first, last) of an open file. Raises Cancelled."""
    found = []
    for piece in range(first, min(last, count_of(size))):
        if cancelled():
            raise Cancelled
        found.append(hashlib.sha256(read_piece(opened, size, piece)).digest())
    return b"".join(found)


def read_piece(opened: int, size: int, piece: int) -> bytes:
    """A piece of an open file of ``size`` bytes; shorter if the file has become shorter."""
    start, end = bounds_of(size, piece)
    came = bytearray()
    while len(came) < end - start and (more := os.pread(opened, end - start - len(came), start + len(came))):
        came += more
    return bytes(came)


def bounds_of(size: int, piece: int) -> Range:
    """The bytes [start, end) of a piece within a file of ``size`` bytes."""
    return piece * PIECE, min((piece + 1) * PIECE, size)


# ------------------------------------------------------------------------------------------------------ what is needed
# The bytes that layers need, told by the headers of their files.


def ranges_of(source: Path, held: Collection[Held], total: int) -> dict[str, list[Range]]:
    """The bytes that stages of these layers, or their ranks, read, by file: small files, headers, and tensors.

    ``source`` is a folder or a GGUF file of a model with ``total`` layers. A stage at either end of the model has all
    tensors outside of the layers, as when it is loaded: (0, 0) are those alone. Layers from ``total`` on are MTP heads,
    which a drafter loads. A rank reads the rows whose outputs it computes (``models.shares``), and of tensors that are
    not stored row by row all bytes. Raises OSError, and ConfigError for a damaged file.
    """
    if source.is_file():
        return gguf_ranges(source, held, total)
    wrapped = is_wrapper(read_json(source / CONFIG_FILE))
    return {
        file.name: safetensors_ranges(file, held, total, wrapped)
        if file.suffix == SAFETENSORS
        else [(0, file.stat().st_size)]
        for file in files_of(source)
    }


def safetensors_ranges(file: Path, held: Collection[Held], total: int, wrapped: bool = False) -> list[Range]:
    """The needed bytes of one file; of a multimodal checkpoint (``wrapped``) only the text part is needed."""
    from penstock.checkpoint.architectures import is_outside
    from penstock.checkpoint.tensors import layer_of

    def readers(name: str) -> list[Held]:
        """The parts that have rows of a tensor."""
        if name.startswith(MTP):
            return [Held(*one.layers) for one in held if one.last > total]
        if wrapped and text_name(name) is None:
            return []
        if is_outside(name):
            return [Held(*one.layers) for one in held]
        return [one for one in held if is_needed(layer_of(name), one, total)]

    with file.open("rb") as opened:
        # Safetensors: the header's length (8 bytes), the header (JSON), then the tensors; offsets count from these.
        begin = 8 + int.from_bytes(opened.read(8), "little")
        try:
            header = from_json(opened.read(begin - 8))
            places = {
                name: (tuple(info["data_offsets"]), info["shape"], str(info["dtype"]))
                for name, info in header.items()
                if name != "__metadata__"
            }
        except (ValueError, KeyError, TypeError, MemoryError) as error:
            raise ConfigError(f"model: {file.name} is damaged: {error}; download it again") from error
    found = [(0, begin)]
    for name, ((start, end), shape, dtype) in places.items():
        # Whole numbers are packed across rows, or are flattened.
        stored = shape if "F" in dtype else []
        found += row_ranges(name, stored, (begin + start, begin + end), readers(name))
    return found


def gguf_ranges(first: Path, held: Collection[Held], total: int) -> dict[str, list[Range]]:
    """The needed bytes of a GGUF model, by file, since it may be split over several: all headers, and tensors."""
    from penstock.checkpoint.gguf import LAYER
    from penstock.checkpoint.gguf_header import read_header, read_one

    tensors = read_header(first).tensors
    needed = {file.name: [(0, read_one(file).data_start)] for file in files_of(first)}
    for name, info in tensors.items():
        layer = int(found[1]) if (found := LAYER.match(name)) else None
        readers = [one for one in held if is_needed(layer, one, total)]
        needed[info.file.name] += row_ranges(name, info.shape, (info.start, info.start + info.nbytes), readers)
    return needed


def is_needed(layer: int | None, held: Held, total: int) -> bool:
    """Whether a stage reads a tensor of this layer; None is a tensor outside of the layers."""
    if layer is None:
        return held.first == 0 or held.last == total
    return held.first <= layer < held.last


def row_ranges(name: str, shape: Sequence[int], place: Range, readers: Collection[Held]) -> list[Range]:
    """The bytes of a tensor at ``place`` in its file that these parts read; all if its rows are not shared."""
    if not all(one.ranks > 1 for one in readers):
        return [place]
    from penstock.models.shares import rows_of_rank

    start, end = place
    found = []
    for one in readers:
        rows = rows_of_rank(name, shape, one.rank, one.ranks, one.groups)
        if rows is None or (end - start) % shape[0]:
            return [place]
        size = (end - start) // shape[0]
        found.append((start + rows.first * size, start + rows.last * size))
    return found


def pieces_of(ranges: Sequence[Range], size: int) -> list[Pieces]:
    """The pieces of a file of ``size`` bytes in which these ranges lie, in ascending order; neighbours are merged."""
    found: list[Pieces] = []
    for start, end in sorted(ranges):
        first, last = start // PIECE, count_of(min(end, size))
        if found and first <= found[-1][1]:
            found[-1] = found[-1][0], max(last, found[-1][1])
        elif last > first:
            found.append((first, last))
    return found


# ------------------------------------------------------------------------------------------------------------------ hub
# Reads ranges of a checkpoint's files from the hub, on a host that reaches it, so that the head need not send them.

SNAPSHOT: Final = re.compile(r"models--(?P<repo>[\w.-]+(?:--[\w.-]+)?)/snapshots/(?P<revision>[0-9a-f]{40})")
"""The name that the hub's cache gives the folder of a repository at a commit."""
ANSWER_S: Final = 2.0
"""Seconds without a byte after which the head is asked instead: a hub this slow is no help."""


class HubSource(msgspec.Struct, frozen=True, kw_only=True):
    """A repository of the hub's at a commit, which never changes."""

    repo: Annotated[str, msgspec.Meta(max_length=256, pattern=r"\A[\w.-]+(?:/[\w.-]+)?\Z")]
    revision: Annotated[str, msgspec.Meta(max_length=40, pattern=r"\A[0-9a-f]{40}\Z")]


def hub_source(checkpoint: Path) -> HubSource | None:
    """The repository and commit of a checkpoint's folder in the hub's cache; None for any other folder."""
    found = SNAPSHOT.fullmatch("/".join(checkpoint.parts[-3:]))
    return HubSource(repo=found["repo"].replace("--", "/"), revision=found["revision"]) if found else None


class Hub:
    """Reads from the hub that this host's environment names, with this host's token. Raises httpx.HTTPError."""

    def __init__(self, source: HubSource) -> None:
        from huggingface_hub.utils import build_hf_headers

        self._source = source
        self._client = httpx.Client(headers=build_hf_headers(), timeout=ANSWER_S, follow_redirects=True)

    def read(self, file: str, start: int, end: int, stopped: Callable[[], bool]) -> bytearray:
        """The bytes of a file from ``start`` to ``end``; fewer if ``stopped`` says so, or if the file ends before."""
        from huggingface_hub import hf_hub_url

        url = hf_hub_url(self._source.repo, file, revision=self._source.revision)
        came = bytearray()
        with self._client.stream("GET", url, headers={"Range": f"bytes={start}-{end - 1}"}) as answer:
            if answer.raise_for_status().status_code != httpx.codes.PARTIAL_CONTENT:
                raise httpx.RequestError("the hub does not send ranges")
            for part in answer.iter_bytes():
                came += part
                if stopped() or len(came) > end - start:
                    break
        return came

    def close(self) -> None:
        self._client.close()


def is_offline() -> bool:
    """Whether this host's environment says that the hub is not to be asked."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)
