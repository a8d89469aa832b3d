"""A header is read as it is written, and nothing of a hostile one is believed."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import pytest
from gguf import GGMLQuantizationType as Kind

from penstock.checkpoint import gguf_header as header_module
from penstock.checkpoint.gguf_header import MOST_ENTRIES, MOST_TENSORS, MOST_VALUES, read_header
from penstock.core import ConfigError
from tests.gguf_files import make_gguf

HUGE = 1 << 62
U32, STRING, ARRAY = 4, 8, 9


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def entry(key: str | bytes, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def array(kind: int, count: int, values: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + values


def tensor(name: str, shape: Sequence[int], kind: int = Kind.F32, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def file_of(
    path: Path,
    entries: Sequence[bytes] = (),
    tensors: Sequence[bytes] = (),
    data: int = 0,
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    counts: tuple[int, int] | None = None,
) -> Path:
    """A file of these parts, and ``data`` bytes behind its header."""
    counts = (len(tensors), len(entries)) if counts is None else counts
    raw = magic + struct.pack("<IQQ", version, *counts) + b"".join([*entries, *tensors])
    path.write_bytes(raw + bytes(-len(raw) % 32 + data))
    return path


def test_it_says_what_the_gguf_packages_reader_says(tmp_path: Path) -> None:
    path = make_gguf(tmp_path, kind=Kind.Q4_1)
    found, reader = read_header(path), gguf.GGUFReader(path)
    assert found.data_start == reader.data_offset
    assert {name: (info.shape, info.kind, info.start, info.nbytes) for name, info in found.tensors.items()} == {
        one.name: (tuple(reversed(one.shape.tolist())), one.tensor_type, one.data_offset, one.n_bytes)
        for one in reader.tensors
    }
    fields = {name: field for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert found.entries.keys() == fields.keys()
    for name, field in fields.items():
        contents: Any = field.contents()
        if isinstance(contents, list):
            assert (found.value(name), found.count(name)) == (None, len(contents))
        else:
            assert (found.value(name), found.count(name)) == (contents, 0)


def test_an_empty_model_is_a_sound_file(tmp_path: Path) -> None:
    found = read_header(file_of(tmp_path / "x"))
    assert (found.entries, found.tensors) == ({}, {})
    assert (found.value("a", 7), found.count("a")) == (7, 0)


@pytest.mark.parametrize(
    ("parts", "problem"),
    [
        ({"magic": b"GGML"}, r"is no GGUF file: it does not begin with GGUF"),
        ({"version": 1}, r"version is 1: versions 2 and 3 can be read"),
        ({"version": 3 << 24}, r"version is 50331648: it is big-endian; convert it with gguf_convert_endian"),
        ({"counts": (0, HUGE)}, rf"entry count is {HUGE}; there may be at most {MOST_ENTRIES}"),
        ({"counts": (HUGE, 0)}, rf"tensor count is {HUGE}; there may be at most {MOST_TENSORS}"),
        ({"counts": (0, 1)}, r"a key: .*|is cut off by the end of the file"),
        ({"counts": (1, 0)}, r"cut off by the end of the file|has the shape"),
        ({"entries": [struct.pack("<Q", HUGE)]}, r"a key: the length is \d+; there may be at most 256"),
        ({"entries": [entry(b"\xff", U32, bytes(4))]}, r"a key is no UTF-8"),
        ({"entries": [entry("a", U32, bytes(4))] * 2}, r"a is there twice"),
        ({"entries": [entry("a", 13, b"")]}, r"a is of type 13, which there is not"),
        ({"entries": [entry("a", STRING, struct.pack("<Q", HUGE))]}, r"a: the length is \d+; there may be at most"),
        ({"entries": [entry("a", STRING, struct.pack("<Q", 5000))]}, r"a is cut off by the end of the file"),
        ({"entries": [entry("a", ARRAY, array(U32, HUGE))]}, rf"a is {HUGE}; there may be at most {MOST_VALUES}"),
        ({"entries": [entry("a", ARRAY, array(U32, 1 << 20))]}, r"a is cut off by the end of the file"),
        ({"entries": [entry("a", ARRAY, array(STRING, 1 << 20))]}, r"a is cut off by the end of the file"),
        ({"entries": [entry("a", ARRAY, array(STRING, 2, text("b") + bytes(4)))]}, r"a is cut off by the end of the"),
        ({"entries": [entry("a", ARRAY, array(STRING, 1, struct.pack("<Q", 5000)))]}, r"a is cut off by the end of"),
        ({"entries": [entry("a", ARRAY, array(STRING, 1, struct.pack("<Q", HUGE)))]}, rf"a is {HUGE}; there may be"),
        ({"entries": [entry("a", ARRAY, array(ARRAY, 1))]}, r"a is an array of type 9, which cannot be read"),
        ({"entries": [entry("general.alignment", U32, struct.pack("<I", 0))]}, r"alignment is 0; .* power of two"),
        ({"entries": [entry("general.alignment", U32, struct.pack("<I", 24))]}, r"alignment is 24"),
        ({"entries": [entry("general.alignment", U32, struct.pack("<I", 1 << 31))]}, r"alignment is 2147483648"),
        ({"entries": [entry("general.alignment", STRING, text("x"))]}, r'alignment is "x"'),
        ({"tensors": [tensor("t", ())]}, r"t has the shape \[\]"),
        ({"tensors": [tensor("t", (4, 0))]}, r"t has the shape \[0, 4\]"),
        ({"tensors": [tensor("t", (1,) * 5)]}, r"t: the number of dimensions is 5; there may be at most 4"),
        ({"tensors": [text("t") + struct.pack("<I", 1 << 31)]}, r"t: the number of dimensions is 2147483648"),
        ({"tensors": [tensor("t", (4,), kind=99)]}, r"t is stored as type 99, which is not known here"),
        ({"tensors": [tensor("t", (40,), kind=Kind.Q4_0)], "data": 64}, r"t has rows of 40 numbers; Q4_0 stores 32"),
        ({"tensors": [tensor("t", (HUGE, HUGE, 2, 2))]}, r"t ends behind the end of the file"),
        ({"tensors": [tensor("t", (8,), offset=HUGE)], "data": 32}, r"t ends behind the end of the file"),
        ({"tensors": [tensor("t", (9,))], "data": 32}, r"t ends behind the end of the file: download it again"),
        ({"tensors": [tensor("t", (1,), offset=8)], "data": 64}, r"t begins at 8, which is no multiple of 32"),
        ({"tensors": [tensor("t", (1,)), tensor("t", (1,), offset=32)], "data": 64}, r"tensors name one of them twice"),
        ({"tensors": [tensor("t", (16,)), tensor("u", (1,), offset=32)], "data": 64}, r"u lies within another tensor"),
        ({"tensors": [tensor("t", (1,)), tensor("u", (1,))], "data": 64}, r"u lies within another tensor"),
    ],
)
def test_what_no_sound_file_holds_is_refused_by_name(tmp_path: Path, parts: dict[str, Any], problem: str) -> None:
    path = file_of(tmp_path / "x.gguf", **parts)
    with pytest.raises(ConfigError, match=problem) as error:
        read_header(path)
    assert str(path) in str(error.value)


def test_a_file_that_is_cut_off_anywhere_is_refused(tmp_path: Path) -> None:
    sound = make_gguf(tmp_path).read_bytes()
    end = read_header(tmp_path / "llama.F32.gguf").data_start
    cut = tmp_path / "cut.gguf"
    for length in (*range(0, end, 97), len(sound) - 1):
        cut.write_bytes(sound[:length])
        with pytest.raises(ConfigError):
            read_header(cut)


def test_a_message_cannot_steer_a_terminal(tmp_path: Path) -> None:
    path = file_of(tmp_path / "x", entries=[entry("\x1b[2J", U32, bytes(4))] * 2)
    with pytest.raises(ConfigError, match=r"\\x1b\[2J is there twice") as error:
        read_header(path)
    assert str(error.value).isprintable()


def test_arrays_are_passed_over_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(header_module, "MOST_VALUES", 3)
    values = array(STRING, 3, text("a") + text("") + text("bcd"))
    found = read_header(file_of(tmp_path / "x", entries=[entry("a", ARRAY, values), entry("b", U32, bytes(4))]))
    assert (found.value("a"), found.count("a"), found.value("b")) == (None, 3, 0)
    assert found.bytes()[found.entries["a"].start : found.entries["a"].end] == entry("a", ARRAY, values)


def test_a_file_that_cannot_be_opened_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_header(tmp_path / "none.gguf")
    (tmp_path / "empty.gguf").write_bytes(b"")
    with pytest.raises(ConfigError, match="is empty"):
        read_header(tmp_path / "empty.gguf")
