"""A checkpoint that is here, for hosts that lack it."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from penstock.hosts.control import FindCheckpoint, WantPiece
from penstock.hosts.weights.digest import digest_of
from penstock.hosts.weights.hub import hub_source
from penstock.hosts.weights.ranges import PIECE, Layers, parts_of
from penstock.messages import MalformedMessage


class Offer:
    """The checkpoint at ``source``, a folder or a file, of so many layers. Raises OSError."""

    def __init__(self, source: Path, layers: int) -> None:
        self.path = str(source)
        self._source = source
        self._layers = layers
        self._digest = digest_of(source)

    def request(self, layers: Collection[Layers]) -> FindCheckpoint:
        """What a host is asked that is to hold these layers. Raises OSError, and ConfigError for a damaged file."""
        return FindCheckpoint(
            path=self.path,
            digest=self._digest,
            is_folder=self._source.is_dir(),
            layers=sorted(layers),
            files=parts_of(self._source, layers, self._layers),
            hub=hub_source(self._source),
        )

    def read(self, wanted: WantPiece) -> bytes:
        """Raises MalformedMessage for what is no piece of the checkpoint, and OSError."""
        file = self._source / wanted.file if self._source.is_dir() else self._source
        whole = 0 < wanted.end - wanted.start <= PIECE
        if not whole or Path(wanted.file).name != wanted.file or wanted.file != file.name or wanted.path != self.path:
            raise MalformedMessage(f"a host wants {wanted.file!r}, which is no piece of {self.path}")
        with file.open("rb") as opened:
            opened.seek(wanted.start)
            return opened.read(wanted.end - wanted.start)
