"""The exchange of rows between the ranks of a stage on one host: numbers in shared memory, and sockets that wake.

A gather uses one half of the memory, the next gather the other:

    rank 0   writes its columns, tells all, waits for all, reads the others'  |  the same in the other half
    rank 1   writes its columns, tells all, waits for all, reads the others'  |  ...

A rank comes back to a half only after all have told it of the gather in between, which they do when they have read what
that half held. Nothing spins: a rank that waits sleeps in the system, and leaves its core to the others.
"""

from __future__ import annotations

import mmap
import socket
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import Final, Protocol

import numpy as np

from penstock.core import PenstockError

HALF: Final = 4 << 20
"""Bytes of one half: rows that take more are gathered in pieces."""
TOLD: Final = b"!"
LENGTH: Final = 4
"""Bytes of a message's length, which stands before it."""


class StageRankLost(PenstockError):
    """Another rank of the stage has ended."""


class RankExchange(Protocol):
    """One rank's end of an exchange, over shared memory or connections: rows to gather, and messages beside them.

    All methods raise StageRankLost where another rank has ended.
    """

    rank: int

    @property
    def peers(self) -> Iterable[int]:
        """The numbers of the other ranks."""
        ...

    @property
    def address(self) -> str:
        """The address at which this rank listens for the others; empty where all were joined from the beginning."""
        ...

    @property
    def descriptors(self) -> list[int]:
        """File descriptors of which one is readable when another rank has ended."""
        ...

    def gather(self, rows_NW: np.ndarray, bounds: Sequence[int]) -> None:
        """Fill in the other ranks' columns: see ``models.shares.Exchange``."""
        ...

    def send(self, peer: int, message: bytes) -> None:
        """Send a message beside the rows."""
        ...

    def receive(self, peer: int) -> bytes:
        """The next message of another rank."""
        ...

    def check(self) -> None:
        """Raise StageRankLost if another rank has ended. Only while none has anything to say."""
        ...

    def connect(self, addresses: Mapping[int, str]) -> None:
        """Connect to the ranks that listen at these addresses, by their numbers."""
        ...


class SharedExchange:
    """One rank's end of the exchange. ``peers`` are the sockets to the others, ``memory`` is what all have mapped."""

    address = ""

    def __init__(self, rank: int, memory: mmap.mmap, peers: Mapping[int, socket.socket]) -> None:
        self.rank = rank
        self.peers = dict(peers)
        half = np.frombuffer(memory, np.float32).reshape(2, -1)
        self._halves = half[0], half[1]
        self._turn = 0

    def gather(self, rows_NW: np.ndarray, bounds: Sequence[int]) -> None:
        """Fill in the other ranks' columns: see ``models.shares.Exchange``. Raises StageRankLost."""
        width = bounds[-1]
        most = max(1, self._halves[0].size // width)
        for start in range(0, len(rows_NW), most):
            self._gather(rows_NW[start : start + most, :width], bounds[self.rank], bounds[self.rank + 1])

    def _gather(self, rows_NW: np.ndarray, first: int, last: int) -> None:
        half, self._turn = self._halves[self._turn], 1 - self._turn
        whole_NW = half[: rows_NW.size].reshape(rows_NW.shape)
        whole_NW[:, first:last] = rows_NW[:, first:last]
        for peer in self.peers:
            self._tell(peer, TOLD)
        for peer in self.peers:
            self._receive(peer, len(TOLD))
        rows_NW[:, :first], rows_NW[:, last:] = whole_NW[:, :first], whole_NW[:, last:]

    def send(self, peer: int, message: bytes) -> None:
        """Send a message beside the rows. Raises StageRankLost."""
        self._tell(peer, len(message).to_bytes(LENGTH) + message)

    def receive(self, peer: int) -> bytes:
        """The next message of another rank. Raises StageRankLost."""
        return self._receive(peer, int.from_bytes(self._receive(peer, LENGTH)))

    @property
    def descriptors(self) -> list[int]:
        return [peer.fileno() for peer in self.peers.values()]

    def connect(self, addresses: Mapping[int, str]) -> None:
        """Do nothing: the ranks were joined before they were forked."""

    def check(self) -> None:
        """Raise StageRankLost if a rank that has nothing to say has ended."""
        for peer in self.peers:
            self._check(peer)

    def _check(self, peer: int) -> None:
        try:
            ended = not self.peers[peer].recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            ended = True
        if ended:
            raise self._lost(peer)

    def close(self) -> None:
        for peer in self.peers.values():
            peer.close()

    def _tell(self, peer: int, told: bytes) -> None:
        try:
            self.peers[peer].sendall(told)
        except OSError as error:
            raise self._lost(peer) from error

    def _receive(self, peer: int, size: int) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            try:
                part = self.peers[peer].recv(size - len(parts))
            except OSError as error:
                raise self._lost(peer) from error
            if not part:
                raise self._lost(peer)
            parts += part
        return bytes(parts)

    def _lost(self, peer: int) -> StageRankLost:
        return StageRankLost(f"rank {peer} of the stage has ended")


def exchanges(ranks: int) -> list[SharedExchange]:
    """The ends of an exchange between so many ranks, before these are forked or run as threads."""
    memory = mmap.mmap(-1, 2 * HALF)
    peers: list[dict[int, socket.socket]] = [{} for _ in range(ranks)]
    for one, other in combinations(range(ranks), 2):
        peers[one][other], peers[other][one] = socket.socketpair()
    return [SharedExchange(rank, memory, sockets) for rank, sockets in enumerate(peers)]
