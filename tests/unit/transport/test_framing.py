"""Messages as bytes, cut anywhere."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.transport.addresses import FRAME, FRAMES, LARGE, MAX_FRAME_BYTES, FramingError, MessageReader, on_the_wire

SIZES = st.one_of(st.integers(0, 40), st.integers(LARGE - 2, LARGE + 2), st.just(3 * LARGE))
FRAME_BYTES = SIZES.map(lambda size: bytes([size % 251]) * size)
MESSAGES = st.lists(st.lists(FRAME_BYTES, min_size=1, max_size=FRAMES), max_size=4)
CUTS = st.lists(st.one_of(st.integers(1, 40), st.integers(1000, 5 * LARGE)), max_size=20).map(
    lambda cuts: cycle([*cuts, 2 * LARGE])
)


def read(reader: MessageReader, wire: bytes | memoryview, most: int) -> list[list[bytes]]:
    """Return the messages in these bytes, which arrive at most ``most`` at a time."""
    chunk = memoryview(bytearray(most))
    messages: list[list[bytes]] = []
    while wire:
        room = reader.room(chunk)
        count = min(len(room), most, len(wire))
        room[:count] = wire[:count]
        wire = wire[count:]
        messages += [[bytes(frame) for frame in frames] for frames in reader.take(room, count)]
    return messages


@given(messages=MESSAGES, cuts=CUTS, most=st.sampled_from((1 << 14, LARGE, 1 << 18)))
def test_messages_are_the_same_however_the_bytes_are_cut(
    messages: list[list[bytes]], cuts: Iterator[int], most: int
) -> None:
    wire = memoryview(b"".join(b"".join(on_the_wire(frames)) for frames in messages))
    reader = MessageReader()
    found = []
    while wire:
        cut = next(cuts)
        found += read(reader, wire[:cut], most)
        wire = wire[cut:]
    assert found == messages


@given(wire=st.binary(max_size=200))
def test_bytes_of_strangers_are_messages_or_refused(wire: bytes) -> None:
    reader = MessageReader()
    found: list[list[bytes]] = []
    try:
        for at in range(len(wire)):
            found += read(reader, wire[at : at + 1], 1)
    except FramingError:
        pass
    said = b"".join(b"".join(on_the_wire(frames)) for frames in found)
    assert wire.startswith(said)


@pytest.mark.parametrize(
    ("wire", "complaint"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "neither 0 nor 1"),
        (FRAME.pack(0, True) * 2 + FRAME.pack(0, False), "more than 2 frames"),
        (FRAME.pack(MAX_FRAME_BYTES + 1, False), f"a frame of {MAX_FRAME_BYTES + 1} bytes"),
    ],
)
def test_what_is_no_frame_is_refused_by_its_first_bytes(wire: bytes, complaint: str) -> None:
    with pytest.raises(FramingError, match=complaint):
        read(MessageReader(), wire, 1)


def test_what_a_frame_announces_is_written_before_it() -> None:
    assert b"".join(on_the_wire([b"header", memoryview(bytes(range(9)))])) == (
        b"\x06\0\0\0\1header" + b"\x09\0\0\0\0" + bytes(range(9))
    )
    assert b"".join(on_the_wire([b""])) == bytes(5)
