"""The arrays of a GGUF file's metadata: texts, and numbers of one type."""

from __future__ import annotations

import struct
from typing import Final

import numpy as np

from penstock.files import problem_in, shown
from penstock.models.gguf.header import ARRAY, LENGTH, SCALARS, STRING, Header

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
