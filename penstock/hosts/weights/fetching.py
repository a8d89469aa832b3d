"""A host gets its part of a checkpoint from the head, piece by piece, beside whatever else its agent does."""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Final

from penstock.core import ConfigError
from penstock.hosts.control import CheckpointFound, FindCheckpoint, Message, Piece, WantPiece
from penstock.hosts.weights.cache import PartialCopy, WeightCache

log = logging.getLogger(__name__)

ON_THEIR_WAY: Final = 8
"""Pieces that are asked for at a time: enough to fill a link, and never more in any memory."""
KEPT_EVERY: Final = 256
"""Pieces after which what has come is remembered, should the agent end before the last."""


class Fetch:
    """A thread that asks the head for what is missing of a checkpoint, then says that it is there.

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
        self._came: queue.SimpleQueue[tuple[Piece, bytes] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="penstock fetch", daemon=True)
        self._thread.start()

    def take(self, piece: Piece, content: bytes) -> None:
        self._came.put((piece, content))

    def stop(self) -> None:
        """The head has gone. What has come is kept."""
        self._came.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            copy = self._cache.copy(self.asked.digest, self.asked.files, self._in_use)
            if not self._fill(copy):
                return
        except (OSError, ConfigError) as error:
            self._tell(CheckpointFound(path=self.asked.path, problem=f"its layers cannot be kept: {error}"))
            return
        self._on_done(copy.folder if self.asked.is_folder else copy.folder / self.asked.files[0].name)
        self._tell(CheckpointFound(path=self.asked.path))

    def _fill(self, copy: PartialCopy) -> bool:
        """Whether all has come."""
        missing = deque(copy.missing())
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
                on_their_way -= 1
                written += 1
                if written % KEPT_EVERY == 0:
                    copy.keep()
        finally:
            copy.keep()
        return True
