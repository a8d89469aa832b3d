"""Gets a host its part of a checkpoint, and proves every byte of it, on a thread beside the agent's.

    its own files at the head's path  --all as they should be-->  found
        | else
    its cache  --nothing missing-->  found
        | else
    the hub, then the head, piece by piece  --nothing missing-->  found

Everything that is found has been hashed on this host and matches the head's digests. A piece counts if it was asked
for, has not come yet, and has its digest; any other piece is refused. A piece that the question does not list ends
the lease: no honest head sends it.
"""

from __future__ import annotations

import hashlib
import logging
import os
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import httpx

from penstock.core import ConfigError
from penstock.files import FileStamps
from penstock.hosts.control import FindCheckpoint, Piece, Progress, WantPiece
from penstock.hosts.weights.cache import PartialCopy, WeightCache
from penstock.hosts.weights.hub import Hub, HubSource, is_offline
from penstock.hosts.weights.manifest import (
    PIECE,
    Cancelled,
    digest_at,
    files_of,
    open_regular,
    read_piece,
    split_digests,
)
from penstock.messages import Frame, MalformedMessage, cut

log = logging.getLogger(__name__)

ON_THEIR_WAY: Final = 8
"""Pieces that are asked of the head at a time: enough to fill a link, and a bound on the memory that they take."""
SPAN: Final = 1 << 24
"""Most bytes of one request to the hub."""
TELL_EVERY: Final = 0.5
"""Seconds between two reports of progress to the head."""
MOST_TRIES: Final = 3
"""Times that a piece may come with a wrong digest before the fetch fails."""
ROOM_FOR: Final = 1 << 28
"""Bytes for which room is made at a time, as pieces come."""

Wanted = tuple[str, int]
"""A file's name and the number of one of its pieces."""


@dataclass(frozen=True)
class Proved:
    """A checkpoint on this host: at ``place``, a folder or a file, all needed bytes have their digests.

    ``stamps`` are of the files that were hashed. As long as they are the same, so are the files.
    """

    place: Path
    stamps: FileStamps


class Fetch:
    """A thread that finds what a ``FindCheckpoint`` asks for, or has it sent, and then tells ``on_end`` of it.

    It runs from ``start`` on. ``on_end`` gets a ``Proved``, or the problem as text; it is not called once the fetch was
    stopped. ``in_use`` gives the digests of copies that have to stay. ``tell`` sends the head a message. Without a
    ``cache`` nothing is fetched.
    """

    def __init__(
        self,
        asked: FindCheckpoint,
        digests: Frame,
        cache: WeightCache | None,
        in_use: Callable[[], Collection[str]],
        tell: Callable[[Progress | WantPiece], None],
        on_end: Callable[[Fetch, Proved | str], None],
    ) -> None:
        self.asked = asked
        self._frame = digests
        self._digests = split_digests(asked.files, digests)
        self._listed = {file.name: file.pieces for file in asked.files}
        self._cache = cache
        self._in_use = in_use
        self._tell = tell
        self._on_end = on_end
        self._stopped = threading.Event()
        self._held = 0
        self._fetched = False
        self._told_at = time.monotonic()
        self._lock = threading.Lock()
        self._expected: set[Wanted] = set()
        """Pieces that were asked of the head and have not come."""
        self._came: queue.SimpleQueue[tuple[Wanted, Frame] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="penstock fetch", daemon=True)

    def start(self) -> None:
        """Begin. Pieces may come from now on, and ``on_end`` may be called before this returns."""
        self._thread.start()

    def again(self) -> Fetch:
        """A new fetch, to be started, that proves the same checkpoint once more. This one has to have ended."""
        return Fetch(self.asked, self._frame, self._cache, self._in_use, self._tell, self._on_end)

    def take(self, piece: Piece, content: Frame) -> bool:
        """Take in a piece if it was asked for and has not come yet. Returns whether it was. Called from any thread.

        Raises MalformedMessage for a piece of this question that it does not list.
        """
        if piece.number != self.asked.number:  # of an earlier question, or of another checkpoint's
            return False
        if not any(first <= piece.piece < last for first, last in self._listed.get(piece.file, ())):
            raise MalformedMessage(f"it sends piece {piece.piece} of {piece.file!r}, which its question does not list")
        wanted = piece.file, piece.piece
        with self._lock:
            if wanted not in self._expected:
                return False
            self._expected.remove(wanted)
        self._came.put((wanted, content))
        return True

    def stop(self) -> None:
        """Stop, since the head has gone or asks for something else. Pieces that have come are kept. Does not wait."""
        self._stopped.set()
        self._came.put(None)  # wakes the thread if it waits for a piece

    def join(self) -> None:
        """Wait for a fetch that was stopped."""
        self._thread.join()

    def _run(self) -> None:
        try:
            found: Proved | str = self._found()
        except Cancelled:
            return
        except (OSError, ConfigError) as error:
            found = f"its layers cannot be kept: {error}"
        except Exception as error:
            log.exception("finding %s has failed", self.asked.path)
            found = f"its layers cannot be had: {type(error).__name__}: {error}"
        if not self._stopped.is_set():
            self._on_end(self, found if isinstance(found, Proved) else cut(found))

    def _found(self) -> Proved | str:
        here = self._proved_here()
        if isinstance(here, Proved) or self._cache is None:
            return here
        log.info("%s; its layers come from the head", here)
        self._held, self._fetched = 0, True
        self._progress(0, at_once=True)
        with self._cache.copy(self.asked.digest, self.asked.files, self._digests) as copy:
            problem = self._filled(copy, self._cache)
        place = copy.folder if self.asked.is_folder else copy.folder / self.asked.files[0].name
        return problem or Proved(place, FileStamps.of(self._hashed_files(place)))

    def _hashed_files(self, place: Path) -> list[Path]:
        folder = place if self.asked.is_folder else place.parent
        return [folder / file.name for file in self.asked.files if file.pieces]

    def _progress(self, count: int, at_once: bool = False) -> None:
        """Add ``count`` proved bytes, and report them to the head every ``TELL_EVERY`` seconds."""
        self._held += count
        if at_once or time.monotonic() >= self._told_at + TELL_EVERY:
            self._told_at = time.monotonic()
            self._tell(Progress(number=self.asked.number, held=self._held, fetched=self._fetched))

    # ---------------------------------------------------------------------------------------------------- what is here

    def _proved_here(self) -> Proved | str:
        """The checkpoint at the head's path, if this host has the same one there, or why not. Raises Cancelled."""
        place = Path(self.asked.path)
        try:
            if sorted(file.name for file in files_of(place)) != sorted(file.name for file in self.asked.files):
                return f"the checkpoint at {place} is another one: its files have other names"
            files = self._hashed_files(place)
            stamps = FileStamps.of(files)  # before they are read: what changes meanwhile has another stamp afterwards
            for file in files:
                if not self._is_proved(file):
                    return f"the checkpoint at {place} is another one: {file.name} differs"
        except ConfigError as error:
            return str(error)
        except (OSError, ValueError) as error:  # ValueError: a path that no file can have, with a null byte
            return f"there is no checkpoint at {place}: {getattr(error, 'strerror', None) or error}"
        return Proved(place, stamps)

    def _is_proved(self, file: Path) -> bool:
        part = next(one for one in self.asked.files if one.name == file.name)
        opened = open_regular(file)
        try:
            if os.fstat(opened).st_size != part.size:
                return False
            for piece in part.needed:
                if self._stopped.is_set():
                    raise Cancelled
                content = read_piece(opened, part.size, piece)
                if hashlib.sha256(content).digest() != digest_at(self._digests[part.name], piece):
                    return False
                self._progress(len(content))
        finally:
            os.close(opened)
        return True

    # -------------------------------------------------------------------------------------------------- what is fetched

    def _filled(self, copy: PartialCopy, cache: WeightCache) -> str:
        """Have all missing pieces of a copy come. Returns why some have not; empty if all have. Raises Cancelled."""
        missing = copy.missing(self._stopped.is_set, self._progress)
        coming = sum(copy.length(*one) for one in missing)
        cache.check_room(coming, self._in_use())
        room = Room(cache, self._in_use)
        if missing and self.asked.hub is not None and not is_offline():
            missing = self._fill_from_hub(copy, self.asked.hub, missing, room)
        problem = self._fill(copy, missing, room)
        cache.make_room(0, self._in_use())  # the bound holds again, now that all is written
        return problem

    def _fill_from_hub(self, copy: PartialCopy, source: HubSource, missing: list[Wanted], room: Room) -> list[Wanted]:
        """Fill a copy with pieces of the hub, as far as it has them. Returns those still missing. Raises Cancelled."""
        hub, held = Hub(source), set[Wanted]()
        try:
            for name, pieces in spans(missing):
                start, length = pieces[0] * PIECE, sum(copy.length(name, piece) for piece in pieces)
                content = memoryview(hub.read(name, start, start + length, self._stopped.is_set))
                self._check_stopped()
                if len(content) != length:  # the hub does not have these bytes: the head sends the rest
                    break
                room.take(length)
                for piece in pieces:
                    at = piece * PIECE - start
                    if copy.write(name, piece, content[at : at + copy.length(name, piece)]):
                        held.add((name, piece))
                        self._progress(copy.length(name, piece))
        except (httpx.HTTPError, ValueError) as error:  # ValueError: a name that no file of the hub's can have
            log.info("%s: not from the hub: %s", source.repo, error)
        finally:
            hub.close()
        return [one for one in missing if one not in held]

    def _fill(self, copy: PartialCopy, missing: Iterable[Wanted], room: Room) -> str:
        """Have the head send these pieces. Returns why some have not come; empty if all have. Raises Cancelled."""
        left, tries = deque(missing), Counter[Wanted]()
        log.info("%d pieces of %s are missing", len(left), self.asked.path)
        on_their_way = 0
        while left or on_their_way:
            while left and on_their_way < ON_THEIR_WAY:
                self._want(left.popleft())
                on_their_way += 1
            came = self._came.get()
            self._check_stopped()
            assert came is not None
            wanted, content = came
            on_their_way -= 1
            room.take(len(content))
            if copy.write(*wanted, content):
                self._progress(len(content))
                continue
            tries[wanted] += 1
            log.warning("%s: piece %d came with other bytes than its digest says", *wanted)
            if tries[wanted] == MOST_TRIES:
                return f"piece {wanted[1]} of {wanted[0]} came {MOST_TRIES} times with other bytes than its digest says"
            left.append(wanted)
        return ""

    def _want(self, wanted: Wanted) -> None:
        with self._lock:  # before the head is asked: the piece may come on another thread at once
            self._expected.add(wanted)
        self._tell(WantPiece(number=self.asked.number, file=wanted[0], piece=wanted[1]))

    def _check_stopped(self) -> None:
        if self._stopped.is_set():
            raise Cancelled


class Room:
    """Room in the cache for pieces, made as they come."""

    def __init__(self, cache: WeightCache, in_use: Callable[[], Collection[str]]) -> None:
        self._cache = cache
        self._in_use = in_use
        self._left = 0

    def take(self, count: int) -> None:
        """Make room for ``count`` bytes that are about to be written."""
        self._left -= count
        if self._left < 0:
            self._cache.make_room(ROOM_FOR, self._in_use())
            self._left = ROOM_FOR


def spans(missing: Iterable[Wanted]) -> Iterator[tuple[str, list[int]]]:
    """Groups of pieces that follow one another in a file, each of ``SPAN`` bytes at most."""
    name, together = "", list[int]()
    for file, piece in missing:
        joins = file == name and piece == together[-1] + 1 and len(together) < SPAN // PIECE
        if together and not joins:
            yield name, together
            together = []
        name = file
        together.append(piece)
    if together:
        yield name, together
