"""Facts about a GGUF file that transformers' classes have told once, kept beside the folder made of the file.

Importing transformers takes longer than all else that a small model's start does. What it says of a file depends on the
file's header and on versions: it is asked once, and later starts read the answer. A record that is damaged, or of
another version, file or question, counts as none.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, TypeVar

import msgspec

from penstock.checkpoint.gate import Parts
from penstock.core import __version__
from penstock.files import CONFIG_FILE, scratch_folder, stamp_of

LAYOUT: Final = 1
"""The version of records. A new number makes them anew."""
MOST_RECORD: Final = 1 << 26
"""Bytes; a larger file is no record."""
MODEL: Final = "model"
"""The name of the record of a whole model."""

Kind = TypeVar("Kind")


class Known(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A file whose whole model transformers has built, without weights, and found complete.

    All its layers have the parts of llama's, and silu.
    """

    config: dict[str, Any]
    """Every field of the configuration, the defaults of its class among them."""
    parts: Parts
    names: dict[str, str]
    """GGUF's name -> transformers', for layer 0 and everything outside of layers."""
    biases: dict[str, tuple[int, ...]]
    """The shapes of layer 0's biases."""
    interleaved: dict[str, int]
    """Part of a layer (``attn_q``) -> its number of heads, where llama.cpp stores a head's rows in another order."""

    def fields(self) -> SimpleNamespace:
        """The configuration's fields as attributes."""
        return SimpleNamespace(**self.config)


def versions() -> str:
    """The versions of all that has a say in what is kept. No package is imported for that."""
    return f"{LAYOUT} {__version__} {version('transformers')} {version('tokenizers')} {version('torch')}"


def question(folder: Path, files: Iterable[Path], *about: object) -> str:
    """The name of what is asked ``about`` a file of weights (or its parts) with this ``folder``. Raises OSError."""
    stated = hashlib.sha256((folder / CONFIG_FILE).read_bytes()).hexdigest()
    return f"{versions()} {stated} {[stamp_of(file) for file in files]} {about}"


def record_of(folder: Path, name: str) -> Path:
    """The file of a record. It is beside the ``folder`` made of a GGUF file, which others read as a checkpoint."""
    return folder.parent.with_name("known") / folder.name / name


def recall(file: Path, asked: str, kind: type[Kind]) -> Kind | None:
    """The record in ``file`` if it answers this very question, else None."""
    try:
        if file.stat().st_size > MOST_RECORD:
            return None
        digest, _, told = file.read_bytes().partition(b"\n")
        return msgspec.json.decode(told, type=kind) if digest == seal(asked, told) else None
    except (OSError, ValueError, RecursionError):  # msgspec's errors are ValueErrors
        return None


def keep(file: Path, asked: str, known: Any) -> None:
    """Keep the answer to a question. A folder that cannot be written to keeps none."""
    told = msgspec.json.encode(known)
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        # Written elsewhere and renamed: other processes may be reading or writing the same record.
        with scratch_folder("new-", file.parent) as folder:
            made = folder / file.name
            made.write_bytes(seal(asked, told) + b"\n" + told)
            made.rename(file)


def seal(asked: str, told: bytes) -> bytes:
    """The first line of a record: a hash by which both its question and its contents are recognised."""
    return hashlib.sha256(asked.encode() + b"\n" + told).hexdigest().encode()
