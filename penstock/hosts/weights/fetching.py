"""A host gets its part of a checkpoint from the hub or the head, piece by piece, beside whatever its agent does."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Final

import httpx

from penstock.core import ConfigError
from penstock.hosts.control import CheckpointFound, Fetched, FindCheckpoint, Message, Piece, WantPiece
from penstock.hosts.weights.cache import PartialCopy, WeightCache
from penstock.hosts.weights.hub import Hub, HubSource, is_offline
from penstock.hosts.weights.ranges import Range

log = logging.getLogger(__name__)

ON_THEIR_WAY: Final = 8
"""Pieces that are asked for at a time: enough to fill a link, and never more in any memory."""
SPAN: Final = 1 << 24
"""Bytes that are asked of the hub at once."""
TELL_EVERY: Final = 0.5
"""Seconds between two words to the head of how far it is."""
KEPT_EVERY: Final = 256
"""Pieces after which what has come is remembered, should the agent end before the last."""


class Fetch:
    """A thread that asks hub and head for what is missing of a checkpoint, then says that it is there.

    ``in_use`` are digests of copies that have to stay. ``on_done`` is told where the copy is, before the head is.
    """

    def __init__(
        self,
        asked: FindCheckpoint,
        cache: WeightCache,
        in_use: Collection[str],
        tell: Callable[[Message], None],
        on_done: Callable[[Path], None],
    ) -> None:
        self.asked = asked
        self._cache = cache
        self._in_use = in_use
        self._tell = tell
        self._on_done = on_done
        self._stopped = False
        self._needed = sum(end - start for file in asked.files for start, end in file.ranges)
        self._lacking = self._needed
        self._told_at = -TELL_EVERY
        self._came: queue.SimpleQueue[tuple[Piece, bytes] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="penstock fetch", daemon=True)
        self._thread.start()

    def take(self, piece: Piece, content: bytes) -> None:
        self._came.put((piece, content))

    def stop(self) -> None:
        """The head has gone. What has come is kept."""
        self._stopped = True
        self._came.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            copy = self._cache.copy(self.asked.digest, self.asked.files, self._in_use)
            if self.asked.hub is not None and not is_offline():
                self._fill_from_hub(copy, self.asked.hub)
            if not self._fill(copy):
                return
        except (OSError, ConfigError) as error:
            self._tell(CheckpointFound(path=self.asked.path, problem=f"its layers cannot be kept: {error}"))
            return
        self._on_done(copy.folder if self.asked.is_folder else copy.folder / self.asked.files[0].name)
        self._tell(CheckpointFound(path=self.asked.path))

    def _missing(self, copy: PartialCopy) -> list[tuple[str, Range]]:
        missing = copy.missing()
        self._lacking = sum(end - start for _, (start, end) in missing)
        return missing

    def _wrote(self, count: int) -> None:
        """Tell the head how far it is, now and then."""
        self._lacking -= count
        if (now := time.monotonic()) >= self._told_at + TELL_EVERY:
            self._told_at = now
            self._tell(Fetched(path=self.asked.path, held=self._needed - self._lacking, needed=self._needed))

    def _fill_from_hub(self, copy: PartialCopy, source: HubSource) -> None:
        """As far as the hub has it."""
        hub = Hub(source)
        try:
            for name, pieces in spans(self._missing(copy)):
                start, end = pieces[0][0], pieces[-1][1]
                content = hub.read(name, start, end, lambda: self._stopped)
                if len(content) != end - start:
                    return
                for first, last in pieces:
                    copy.write(name, (first, last), content[first - start : last - start])
                self._wrote(len(content))
        except (httpx.HTTPError, ValueError) as error:  # ValueError: a name that the hub has for nothing
            log.info("%s: not from the hub: %s", source.repo, error)
        finally:
            hub.close()
            copy.keep()

    def _fill(self, copy: PartialCopy) -> bool:
        """Whether all has come."""
        missing = deque(self._missing(copy))
        log.info("%d pieces of %s are missing", len(missing), self.asked.path)
        on_their_way = 0
        written = 0
        try:
            while missing or on_their_way:
                while missing and on_their_way < ON_THEIR_WAY:
                    name, (start, end) = missing.popleft()
                    self._tell(WantPiece(path=self.asked.path, file=name, start=start, end=end))
                    on_their_way += 1
                if (came := self._came.get()) is None:
                    return False
                piece, content = came
                copy.write(piece.file, (piece.start, piece.end), content)
                self._wrote(len(content))
                on_their_way -= 1
                written += 1
                if written % KEPT_EVERY == 0:
                    copy.keep()
        finally:
            copy.keep()
        return True


def spans(missing: Iterable[tuple[str, Range]]) -> Iterator[tuple[str, list[Range]]]:
    """Pieces that touch, of a file, together: of as many bytes at most as are asked of the hub at once."""
    name, together = "", list[Range]()
    for file, piece in missing:
        joins = file == name and together[-1][1] == piece[0] and piece[1] - together[0][0] <= SPAN
        if together and not joins:
            yield name, together
            together = []
        name = file
        together.append(piece)
    if together:
        yield name, together
