"""Offers a checkpoint of this host to hosts that lack it."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from penstock.core import CheckpointChanged, PenstockError
from penstock.files import CHANGED, FileStamps
from penstock.hosts.control import FindCheckpoint, Piece, WantPiece, encode
from penstock.hosts.weights.fetching import MOST_TRIES, ON_THEIR_WAY
from penstock.hosts.weights.hub import hub_source
from penstock.hosts.weights.manifest import (
    FilePart,
    Layers,
    digest_of,
    files_of,
    hashed,
    open_regular,
    pieces_of,
    ranges_of,
    read_piece,
)
from penstock.messages import MalformedMessage
from penstock.transport.outbox import Outbox

log = logging.getLogger(__name__)

BACKLOG: Final = 1 << 20
"""Bytes that may wait to leave for a host before the next piece is read."""


@dataclass(frozen=True)
class Question:
    """A question to a host, with the digests of pieces that go with it."""

    asked: FindCheckpoint
    digests: bytes

    @property
    def needed_bytes(self) -> int:
        return sum(file.needed_bytes for file in self.asked.files)


class Offer:
    """The checkpoint at ``source``, a folder or a file, of ``layers`` layers: as it was when this was made.

    Every byte is hashed, at the rate of the disk or of SHA-256: 1.8 GB a second were measured on a core that has
    instructions for it. Raises OSError, and ConfigError.
    """

    def __init__(self, source: Path, layers: int, cancelled: Callable[[], bool] = lambda: False) -> None:
        self.path = str(source)
        self._source = source
        self._layers = layers
        places = {file.name: file for file in files_of(source)}
        self._stamps = FileStamps.of(places.values())  # before they are read: a change meanwhile then shows
        self._places = places
        self._files = {one.name: one for one in hashed(source, cancelled)}
        self._ranges: dict[tuple[Layers, ...], dict[str, list[tuple[int, int]]]] = {}

    def prepare(self, layers: Collection[Layers]) -> None:
        """Look up the bytes that these layers need. Raises OSError, and ConfigError for a damaged file."""
        held = tuple(sorted(layers))
        if held not in self._ranges:
            self._ranges[held] = ranges_of(self._source, held, self._layers)

    def question(self, layers: Collection[Layers], number: int) -> Question:
        """The question for a host that is to hold these layers. Raises OSError, and ConfigError for a damaged file."""
        self.prepare(layers)
        held = tuple(sorted(layers))
        ranges = self._ranges[held]
        files = [
            FilePart(one.name, one.size, one.root, pieces_of(ranges.get(one.name, []), one.size))
            for one in self._files.values()
        ]
        asked = FindCheckpoint(
            number=number,
            path=self.path,
            digest=digest_of(files),
            is_folder=self._source.is_dir(),
            layers=list(held),
            files=files,
            hub=hub_source(self._source),
        )
        return Question(asked, b"".join(self._files[one.name].digests for one in files if one.pieces))

    def check(self) -> None:
        """Raise CheckpointChanged if a file has changed since this was made."""
        if (file := self._stamps.changed) is not None:
            raise CheckpointChanged(f"model: {file} {CHANGED}")

    def read(self, file: str, piece: int) -> bytes:
        """A piece of the checkpoint. Raises CheckpointChanged, and OSError."""
        self.check()
        opened = open_regular(self._places[file])
        try:
            return read_piece(opened, self._files[file].size, piece)
        finally:
            os.close(opened)


class Courier:
    """A thread that sends one host the pieces of an offer that it wants, over a connection of their own.

    Beats therefore never wait behind a piece. ``on_fault`` is told why a piece cannot be sent.
    """

    def __init__(
        self, offer: Offer, question: Question, outbox: Outbox, lease: str, on_fault: Callable[[str], None]
    ) -> None:
        self._offer = offer
        self._number = question.asked.number
        self._needed = {(file.name, piece) for file in question.asked.files for piece in file.needed}
        self._outbox = outbox
        self._lease = lease
        self._on_fault = on_fault
        self._wanted: queue.Queue[WantPiece | None] = queue.Queue(2 * ON_THEIR_WAY)
        self._tries = Counter[tuple[str, int]]()
        self._stopped = False
        self.brought = 0
        """Bytes of pieces that have been handed to the connection."""
        self._thread = threading.Thread(target=self._run, name="penstock courier", daemon=True)
        self._thread.start()

    def want(self, wanted: WantPiece) -> None:
        """Have a piece sent, unless it was wanted for an earlier question.

        Raises MalformedMessage for a piece that the host does not need or wants too often, and for too many at a time.
        """
        if wanted.number != self._number:
            return
        piece = wanted.file, wanted.piece
        self._tries[piece] += 1
        if piece not in self._needed or self._tries[piece] > MOST_TRIES:
            raise MalformedMessage(f"it wants piece {piece[1]} of {piece[0]}, which it does not need, or has had")
        try:
            self._wanted.put_nowait(wanted)
        except queue.Full:
            raise MalformedMessage(f"it wants more than {2 * ON_THEIR_WAY} pieces at a time") from None

    def stop(self) -> None:
        """Send no more. Does not wait."""
        self._stopped = True
        with contextlib.suppress(queue.Full):  # then the thread has something to take, and sees that it is stopped
            self._wanted.put_nowait(None)

    def _run(self) -> None:
        try:
            while (wanted := self._wanted.get()) is not None and not self._stopped:
                self._outbox.drain(BACKLOG)  # before the next piece is read, so that few are in memory
                content = self._offer.read(wanted.file, wanted.piece)
                piece = Piece(number=wanted.number, file=wanted.file, piece=wanted.piece)
                self._outbox.send(encode(piece, self._lease), content)
                self.brought += len(content)
        except (PenstockError, OSError) as error:
            self._on_fault(str(error))
        except Exception as error:
            log.exception("a piece could not be brought")
            self._on_fault(f"{type(error).__name__}: {error}")
