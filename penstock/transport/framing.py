"""Messages as bytes, in the same format on every connection.

A connection begins with a token that can be made only with the session's secret; without it nothing more is read. A
message is one frame or two. On the wire a frame is its length, whether another frame of the message follows, and its
bytes.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import Final

from penstock.core import PenstockError
from penstock.messages import MAX_HEADER_BYTES, Frame

FRAME: Final = struct.Struct("<I?")
FRAMES: Final = 2
"""The most frames of a message: a header and a tensor."""
MAX_FRAME_BYTES: Final = 1 << 30
assert MAX_HEADER_BYTES < MAX_FRAME_BYTES
TOKEN_BYTES: Final = 32
"""Bytes of the secret that a connection begins with."""
LARGE: Final = 1 << 16
"""Size in bytes from which an incomplete frame gets a buffer of its own, into which the rest is read without a copy."""

Bytes = bytes | bytearray | memoryview


class FramingError(PenstockError):
    """Bytes on a connection that are not a valid frame."""


def token_of(session: str) -> bytes:
    """The token with which a session's connections begin. Its length is fixed, so that no peer announces a size."""
    return hashlib.sha256(session.encode()).digest()


def on_the_wire(frames: Sequence[Bytes]) -> list[Bytes]:
    """A message's bytes. Only the last frame, which may be a large tensor, is not copied."""
    parts: list[Bytes] = []
    for i, frame in enumerate(frames, start=1):
        parts += (FRAME.pack(len(frame), i < len(frames)), frame)
    return [b"".join(parts[:-1]), parts[-1]]


class MessageReader:
    """Cuts a connection's bytes into messages, wherever the reads have split them.

    The reader puts bytes into ``room`` and says with ``take`` how many there are. No frame may exceed ``most`` bytes.
    """

    def __init__(self, most: int = MAX_FRAME_BYTES) -> None:
        self._most = most
        self._held = bytearray()
        """Bytes of a frame that is not complete."""
        self._large: bytearray | None = None
        """The buffer of an incomplete large frame, of which ``_filled`` bytes are there; ``_held`` is empty then."""
        self._filled = 0
        self._more = False
        """Whether another frame of the message follows the large one."""
        self._frames: list[Frame] = []
        """The first frames of a message that is not complete."""

    def room(self, chunk: memoryview) -> memoryview:
        """Where the next bytes belong: the rest of a large frame, or else ``chunk``."""
        return chunk if self._large is None else memoryview(self._large)[self._filled :]

    def take(self, room: memoryview, count: int) -> list[list[Frame]]:
        """Every message that these ``count`` bytes in ``room`` complete. Raises FramingError."""
        if self._large is not None:
            return self._take_large(count)
        came = room[:count]
        if not self._held:  # the usual case, without a copy: messages arrive whole
            messages, end = self._messages_in(came)
            self._held += came[end:]
            return messages
        self._held += came
        with memoryview(self._held) as held:
            messages, end = self._messages_in(held)
        del self._held[:end]
        return messages

    def _take_large(self, count: int) -> list[list[Frame]]:
        assert self._large is not None
        self._filled += count
        if self._filled < len(self._large):
            return []
        frame, self._large = self._large, None
        return self._with(frame, self._more)

    def _messages_in(self, held: memoryview) -> tuple[list[list[Frame]], int]:
        """The messages that end in ``held``, and the index from which on its bytes have to be kept."""
        messages: list[list[Frame]] = []
        start = 0
        while len(held) >= start + FRAME.size:
            length, more = self._announced(held, start)
            first, end = start + FRAME.size, start + FRAME.size + length
            if end > len(held):
                if length < LARGE:
                    break
                # The rest is read into the frame's own buffer: nothing behind this frame has arrived yet.
                self._begin_large(held[first:], length, more)
                return messages, len(held)
            messages += self._with(held[first:end].tobytes(), more)
            start = end
        return messages, start

    def _announced(self, held: memoryview, start: int) -> tuple[int, bool]:
        """A frame's length, and whether another one follows it.

        Raises FramingError before anything is allocated for it.
        """
        if len(self._frames) == FRAMES:
            raise FramingError(f"a message of more than {FRAMES} frames")
        # Checked before ``unpack_from``, which would take any other byte for True.
        if held[start + FRAME.size - 1] > 1:
            raise FramingError("a frame's mark is neither 0 nor 1")
        length, more = FRAME.unpack_from(held, start)
        if length > self._most:
            raise FramingError(f"a frame of {length} bytes; {self._most} are the most")
        return length, more

    def _begin_large(self, came: memoryview, length: int, more: bool) -> None:
        self._large, self._filled, self._more = bytearray(length), len(came), more
        self._large[: len(came)] = came

    def _with(self, frame: Frame, more: bool) -> list[list[Frame]]:
        """The message that this frame completes, if it does."""
        self._frames.append(frame)
        if more:
            return []
        message, self._frames = self._frames, []
        return [message]
