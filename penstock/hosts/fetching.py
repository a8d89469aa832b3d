"""Parts of checkpoints for hosts that lack them: offered by the head, fetched, and kept."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import queue
import re
import shutil
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Final

import httpx

from penstock.config import FieldError
from penstock.core import CheckpointChanged, ConfigError, PenstockError
from penstock.files import CHANGED, FileStamps, cache_folder
from penstock.hosts.messages import FindCheckpoint, Piece, Progress, WantPiece, encode
from penstock.hosts.weights import (
    PIECE,
    Cancelled,
    FilePart,
    Held,
    Hub,
    HubSource,
    bounds_of,
    digest_at,
    digest_of,
    files_of,
    hashed,
    hub_source,
    is_offline,
    open_regular,
    pieces_of,
    ranges_of,
    read_piece,
    split_digests,
)
from penstock.messages import Frame, MalformedMessage, cut
from penstock.transport.outbox import Outbox

# ---------------------------------------------------------------------------------------------------------------- cache
# Parts of checkpoints that other hosts have sent: kept over restarts, checked before each use, and bounded in size.
#
# A checkpoint's folder is named by its digest, which determines every byte of it. Its files are as long as the
# originals and hold the pieces that were sent; the rest are holes, which take no room and never count as content. There
# is no other record of what a file holds: its pieces are hashed. Files are opened beneath that folder, and never by a
# link.

log = logging.getLogger(__name__)

FOLDER: Final = re.compile(r"[0-9a-f]{64}")
"""Matches the name of a copy's folder, a checkpoint's digest."""
LEFT_FREE: Final = 1 << 30
"""Bytes of the disk that are left free, however much heads send. A full disk fails whatever else writes to it."""


def default_cache() -> Path:
    """The folder of copies if the options name none."""
    return cache_folder() / "weights"


def cache_for(named: str | None) -> Path:
    """The folder of copies that an option names, or the default one.

    Raises FieldError for a named folder in which nothing can be kept. An engine that has layers to send would be told
    of it otherwise, on another host. Without the default one this host still holds layers of checkpoints that it has.
    """
    folder = default_cache() if named is None else Path(named).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        problem = f"is {str(folder)!r}, where no layers can be kept: {error.strerror}"
        if named is not None:
            raise FieldError("cache", f"{problem}; name another folder") from error
        log.warning("cache %s: only checkpoints that are on this host can be run; name a folder with --cache", problem)
    return folder


class PartialCopy:
    """The local copy of one checkpoint, while it is filled. ``digests`` are those of each file's pieces.

    ``close`` closes its files. Raises OSError, also for anything that is not a regular file.
    """

    def __init__(self, folder: Path, files: Sequence[FilePart], digests: dict[str, memoryview]) -> None:
        self.folder = folder
        self._digests = digests
        self._needed = {file.name: file for file in files if file.pieces}
        self._opened: dict[str, int] = {}
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        beneath = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            for file in self._needed.values():
                self._opened[file.name] = self._open(file, beneath)
        except BaseException:
            self.close()
            raise
        finally:
            os.close(beneath)

    def _open(self, file: FilePart, beneath: int) -> int:
        opened = open_regular(file.name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, beneath)
        found = os.fstat(opened)
        # A hard link: writing would change a file elsewhere.
        if found.st_nlink > 1:
            os.close(opened)
            raise OSError(None, "has other names", str(self.folder / file.name))
        # Lengthened with a hole, which takes no room; shortened, where another file had this name.
        if found.st_size != file.size:
            os.ftruncate(opened, file.size)
        return opened

    def missing(self, cancelled: Callable[[], bool], on_held: Callable[[int], None]) -> list[tuple[str, int]]:
        """The needed pieces, by file and number, that the copy lacks; every piece that seems to be there is hashed.

        ``on_held`` is told the bytes of each piece that is there. Raises Cancelled.
        """
        missing = []
        for name, file in self._needed.items():
            for piece in file.needed:
                if cancelled():
                    raise Cancelled
                if self._is_held(file, piece):
                    on_held(length_of(file, piece))
                else:
                    missing.append((name, piece))
        return missing

    def _is_held(self, file: FilePart, piece: int) -> bool:
        """Whether a piece is there, by its digest."""
        opened, expected = self._opened[file.name], digest_at(self._digests[file.name], piece)
        # A hole was never written, and is right only if the piece is to be all zeros.
        if has_hole(opened, *bounds_of(file.size, piece)):
            return digest_of_zeros(length_of(file, piece)) == expected
        return hashlib.sha256(read_piece(opened, file.size, piece)).digest() == expected

    def write(self, name: str, piece: int, content: bytes | bytearray | memoryview) -> bool:
        """Write a piece if its digest is right. Returns whether it is. Raises OSError if it cannot be written."""
        if hashlib.sha256(content).digest() != digest_at(self._digests[name], piece):
            return False
        start, _ = bounds_of(self._needed[name].size, piece)
        left = memoryview(content)
        while left:
            # A write may take only a part of it.
            written = os.pwrite(self._opened[name], left, start)
            left, start = left[written:], start + written
        return True

    def length(self, name: str, piece: int) -> int:
        """Bytes of a piece."""
        return length_of(self._needed[name], piece)

    def close(self) -> None:
        """Close the copy's files. Safe to call twice."""
        for opened in self._opened.values():
            os.close(opened)
        self._opened.clear()

    def __enter__(self) -> PartialCopy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class WeightCache:
    """Copies in ``folder`` by their checkpoints' digests; those not in use take ``most_bytes`` at most."""

    def __init__(self, folder: Path, most_bytes: float) -> None:
        self.folder = folder
        self._most_bytes = most_bytes

    def copy(self, digest: str, files: Sequence[FilePart], digests: dict[str, memoryview]) -> PartialCopy:
        """The copy of a checkpoint, to be filled. Raises OSError if its folder or files cannot be made."""
        found = PartialCopy(self.folder / digest, files, digests)
        os.utime(found.folder)  # ``make_room`` removes the folders with the oldest time
        return found

    def check_room(self, coming: int, in_use: Collection[str]) -> None:
        """Raise ConfigError if ``coming`` bytes have no room even without all copies that are not in use."""
        free = shutil.disk_usage(self.folder).free
        if coming > free + sum(map(held_bytes, self._others(in_use))) - LEFT_FREE:
            raise ConfigError(
                f"{coming / 1e9:.2f} GB have to be sent, and the disk of {self.folder} has {free / 1e9:.2f} GB free, "
                f"of which {LEFT_FREE / 1e9:.1f} GB stay so; free some, or name another folder with --cache"
            )

    def make_room(self, coming: int, in_use: Collection[str]) -> None:
        """Remove the copies that were used longest ago, while all take more than the bound or the disk lacks room.

        ``coming``: bytes that are about to be written, not just announced, so that a head's announcement alone removes
        nothing. ``in_use``: digests of copies that stay.
        """
        others = self._others(in_use)
        held = {one: held_bytes(one) for one in others}
        while others and (sum(held[one] for one in others) > self._most_bytes or self._lacks(coming)):
            oldest = others.pop(0)
            log.info("removing %s, to make room", oldest)
            shutil.rmtree(oldest, ignore_errors=True)

    def _lacks(self, coming: int) -> bool:
        return shutil.disk_usage(self.folder).free < coming + LEFT_FREE

    def _others(self, in_use: Collection[str]) -> list[Path]:
        """Folders of the copies that are not in use, the one that was used longest ago first."""
        return sorted((one for one in self._copies() if one.name not in in_use), key=lambda one: one.stat().st_mtime)

    def _copies(self) -> Iterator[Path]:
        try:
            yield from (one for one in self.folder.iterdir() if FOLDER.fullmatch(one.name) and not one.is_symlink())
        except FileNotFoundError:
            return


def has_hole(opened: int, start: int, end: int) -> bool:
    """Whether some of the bytes from ``start`` to ``end`` were never written, as far as the file system tells."""
    try:
        return os.lseek(opened, start, os.SEEK_HOLE) < end
    except (AttributeError, OSError):  # it tells nothing: what was never written reads as zeros
        return False


@cache
def digest_of_zeros(length: int) -> bytes:
    """The digest of ``length`` zeros, as a hole would have it."""
    return hashlib.sha256(bytes(length)).digest()


def length_of(file: FilePart, piece: int) -> int:
    """Bytes of a piece; the last one of a file may be shorter than ``PIECE``."""
    start, end = bounds_of(file.size, piece)
    return end - start


def held_bytes(folder: Path) -> int:
    """Bytes that a copy takes on the disk; files that vanish meanwhile are passed over."""
    found = 0
    for file in folder.iterdir():
        try:
            found += 512 * file.lstat().st_blocks  # blocks of 512 bytes; holes have none
        except FileNotFoundError:
            continue
    return found


# ------------------------------------------------------------------------------------------------------------- fetching
# Gets a host its part of a checkpoint, and proves every byte of it, on a thread beside the agent's.
#
#     its own files at the head's path  --all as they should be-->  found
#         | else
#     its cache  --nothing missing-->  found
#         | else
#     the hub, then the head, piece by piece  --nothing missing-->  found
#
# Everything that is found has been hashed on this host and matches the head's digests. A piece counts if it was asked
# for, has not come yet, and has its digest; any other piece is refused. A piece that the question does not list ends
# the lease: no honest head sends it.

ON_THEIR_WAY: Final = 8
"""Pieces that are asked of the head at a time: enough to fill a link, and a bound on the memory that they take."""
SPAN: Final = 1 << 24
"""Most bytes of one request to the hub. It is 64 pieces, which would else be a request each."""
TELL_EVERY: Final = 0.5
"""Seconds between two reports of progress to the head. The head gives up a host without progress for
``remote.ANSWER_S``, 10 s."""
MOST_TRIES: Final = 3
"""Times that a piece may come with a wrong digest before the fetch fails. One or two faults may be a link's or a
memory's."""
ROOM_FOR: Final = 1 << 28
"""Bytes for which room is made at a time, as pieces come. Looking for each piece would be a thousand looks at the
disk."""

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
        """Tell the thread to stop, without waiting for it: the head has disconnected or wants other files.

        Pieces that have arrived stay on the disk.
        """
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
        """Whether the needed pieces of a file have their digests. Raises OSError, and Cancelled."""
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
        """Ask the head for a piece."""
        with self._lock:  # before the head is asked: the piece may come on another thread at once
            self._expected.add(wanted)
        self._tell(WantPiece(number=self.asked.number, file=wanted[0], piece=wanted[1]))

    def _check_stopped(self) -> None:
        """Raise Cancelled if the fetch was stopped."""
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


# ------------------------------------------------------------------------------------------------------------- offering
# Offers a checkpoint of this host to hosts that lack it.

BACKLOG: Final = 1 << 20
"""Bytes that may wait to leave for a host before the next piece is read. Four pieces fill a link; more of them take
more of the head's memory."""


@dataclass(frozen=True)
class Question:
    """A question to a host, with the digests of pieces that go with it."""

    asked: FindCheckpoint
    digests: bytes

    @property
    def needed_bytes(self) -> int:
        """Bytes that the host has to hold."""
        return sum(file.needed_bytes for file in self.asked.files)


class Offer:
    """The checkpoint at ``source``, a folder or a file, of ``layers`` layers: as it was when this was made.

    With None it is a learned drafter's, which is needed as a whole.

    Every byte is hashed, at the rate of the disk or of SHA-256: 1.8 GB a second were measured on a core that has
    instructions for it. Raises OSError, and ConfigError.
    """

    def __init__(self, source: Path, layers: int | None, cancelled: Callable[[], bool] = lambda: False) -> None:
        self.path = str(source)
        self._source = source
        self._layers = layers
        places = {file.name: file for file in files_of(source)}
        self._stamps = FileStamps.of(places.values())  # before they are read: a change meanwhile then shows
        self._places = places
        self._files = {one.name: one for one in hashed(source, cancelled)}
        self._ranges: dict[tuple[Held, ...], dict[str, list[tuple[int, int]]]] = {}

    def prepare(self, layers: Collection[Held]) -> None:
        """Look up the bytes that these layers need. Raises OSError, and ConfigError for a damaged file."""
        held = tuple(sorted(layers))
        if held not in self._ranges:
            whole = {one.name: [(0, one.size)] for one in self._files.values()}
            self._ranges[held] = whole if self._layers is None else ranges_of(self._source, held, self._layers)

    def question(self, layers: Collection[Held], number: int) -> Question:
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
            layers=list(dict.fromkeys(one.layers for one in held)),
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
        """Send the pieces that are wanted, one after the other."""
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
