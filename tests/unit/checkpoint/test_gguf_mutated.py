"""A GGUF file with anything changed in its header either opens or is refused, and soon."""

from __future__ import annotations

import contextlib
import struct
import time
from pathlib import Path
from typing import Final

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.load.attacking.checkpoints import open_all
from penstock.checkpoint.gguf_header import Header, read_header
from penstock.core import ConfigError
from tests.gguf_files import make_gguf

SOON: Final = 20.0
"""Seconds. A sound one takes a fifth of one; whatever the header makes loop or fill the memory takes far longer."""
NUMBERS: Final = (0, 1, 2, 3, 7, 255, 1 << 16, 10**6, (1 << 31) - 1, 1 << 31, (1 << 32) - 1)
LONG_NUMBERS: Final = (0, 1, 31, 256, 1 << 20, 1 << 32, 1 << 40, (1 << 63) - 1, (1 << 64) - 1)
LENIENT: Final = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Header:
    return read_header(make_gguf(tmp_path_factory.mktemp("sound")))


def opens_or_is_refused(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    begin = time.monotonic()
    with contextlib.suppress(ConfigError):
        open_all(path)
    assert time.monotonic() - begin < SOON


def test_it_opens_as_it_is(sound: Header) -> None:
    open_all(sound.path)


@settings(max_examples=25, suppress_health_check=LENIENT)
@given(data=st.data())
def test_any_entry_may_have_any_number(sound: Header, tmp_path: Path, data: st.DataObject) -> None:
    """Also where it is a text's or an array's length, or the type of what follows."""
    content = bytearray(sound.path.read_bytes())
    for _ in range(data.draw(st.integers(1, 2), "changes")):
        key = data.draw(st.sampled_from(sorted(sound.entries)), "entry")
        entry = sound.entries[key]
        at = entry.start + 8 + len(key) + data.draw(st.sampled_from((0, 4, 8)), "place")
        if data.draw(st.booleans(), "long"):
            content[at : at + 8] = struct.pack("<Q", data.draw(st.sampled_from(LONG_NUMBERS), "number"))
        else:
            content[at : at + 4] = struct.pack("<I", data.draw(st.sampled_from(NUMBERS), "number"))
    opens_or_is_refused(tmp_path / "mutated.gguf", bytes(content))


@settings(max_examples=25, suppress_health_check=LENIENT)
@given(data=st.data())
def test_any_tensor_may_be_anywhere_and_anything(sound: Header, tmp_path: Path, data: st.DataObject) -> None:
    content = bytearray(sound.path.read_bytes())
    name = data.draw(st.sampled_from(sorted(sound.tensors)), "tensor").encode()
    at = content.index(struct.pack("<Q", len(name)) + name) + 8
    end = at + len(name) + 4 + 8 * len(sound.tensors[name.decode()].shape) + 12
    for _ in range(data.draw(st.integers(1, 3), "changes")):
        place = data.draw(st.integers(at, end - 1), "place")
        content[place] = data.draw(st.integers(0, 255), "byte")
    opens_or_is_refused(tmp_path / "mutated.gguf", bytes(content))


@settings(max_examples=25, suppress_health_check=LENIENT)
@given(data=st.data())
def test_any_byte_may_be_another(sound: Header, tmp_path: Path, data: st.DataObject) -> None:
    content = bytearray(sound.path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4), "changes")):
        content[data.draw(st.integers(0, sound.data_start - 1), "place")] = data.draw(st.integers(0, 255), "byte")
    opens_or_is_refused(tmp_path / "mutated.gguf", bytes(content))
