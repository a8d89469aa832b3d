"""The ranks behind the first of a stage, and their exchange of rows, on one host or on several."""

from __future__ import annotations

import logging
import mmap
import socket
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import Annotated, Final, Protocol

import msgspec
import numpy as np

from penstock.core import MOST_RANKS, PenstockError
from penstock.messages import MOST, Address, Batch, Frame, begins, opening
from penstock.stage.visibility import BatchView, Visibility
from penstock.transport.inbox import Inbox
from penstock.transport.outbox import Outbox, Sockets

# ------------------------------------------------------------------------------------------------------------- exchange
# The exchange of rows between the ranks of a stage on one host: values in shared memory, and sockets that wake.
#
# A gather uses one half of the memory, the next gather the other:
#
#     rank 0   writes its columns, tells all, waits for all, reads the others'  |  the same in the other half
#     rank 1   writes its columns, tells all, waits for all, reads the others'  |  ...
#
# A rank comes back to a half only after all have told it of the gather in between, which they do when they have read
# what that half held. Nothing spins: a rank that waits sleeps in the system, and leaves its core to the others.

HALF: Final = 4 << 20
"""Bytes of one half of the shared memory: rows that take more are gathered in pieces. Smaller halves take more pieces,
larger ones more memory for every stage that has ranks."""
TOLD: Final = b"!"
"""The byte that tells another rank that this one has written its columns."""
LENGTH: Final = 4
"""Bytes of the number before a message, which is the message's length in bytes."""


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
        """Fill in the other ranks' columns of ``rows_NW``, float32 [N, W]; rank r's are bounds[r] to bounds[r + 1].

        See ``models.shares.Exchange``.
        """
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
    """One rank's end of the exchange. ``peers`` are the sockets to the others, ``memory`` is mapped by all."""

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
        # Written before any other rank is told, and told to all before waiting for one: each rank waits for bytes that
        # the others have sent by then, so that no two wait for each other.
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


# ------------------------------------------------------------------------------------------------------------- follower
# The ranks behind the first of a stage: they hold shares of its layers, and compute each batch beside the first rank.


class Begin(msgspec.Struct, tag="begin", kw_only=True):
    """Asks a rank to forget all batches, because a new stream begins."""


class Step(msgspec.Struct, tag="step", kw_only=True):
    """Asks a rank to compute ``rows`` (indices) of the next batch, then its share of the logits of ``asked`` rows."""

    batch: Batch
    rows: list[int]
    asked: int


class Loaded(msgspec.Struct, tag="loaded", kw_only=True):
    """A rank has loaded its share, which takes ``weight_bytes`` and ``kv_bytes``; ``problem`` says why it could not.

    Others reach it at ``address``, where they were not joined from the beginning.
    """

    weight_bytes: int = 0
    kv_bytes: int = 0
    problem: str = ""
    address: Address | None = None


class Meet(msgspec.Struct, tag="meet", kw_only=True):
    """The addresses of all ranks, in order, once they have loaded: each connects to those that it has not met yet."""

    addresses: Annotated[list[Address], msgspec.Meta(max_length=MOST_RANKS)]


_encode = msgspec.msgpack.Encoder().encode
_step = msgspec.msgpack.Decoder(Begin | Step)
_loaded = msgspec.msgpack.Decoder(Loaded)
_meet = msgspec.msgpack.Decoder(Meet)


class ShareOfLayers(Protocol):
    """A rank's share of a stage's layers, as ``models.stage_model.StageModel`` has it."""

    def follow(self, view: BatchView, asked: int) -> None:
        """Compute a batch beside the first rank, which picks tokens after ``asked`` rows."""
        ...

    def forget(self) -> None:
        """Forget all rows."""
        ...


class Leader:
    """The first rank's means to have the others compute each batch beside it."""

    def __init__(self, exchange: RankExchange) -> None:
        self.exchange = exchange

    def loaded(self) -> list[Loaded]:
        """The others' reports, once all of them have loaded and know each other. Raises StageRankLost."""
        told = {peer: _loaded.decode(self.exchange.receive(peer)) for peer in self.exchange.peers}
        addresses = {peer: one.address for peer, one in told.items() if one.address}
        if addresses and not any(one.problem for one in told.values()):
            self.exchange.connect(addresses)
            self._tell(Meet(addresses=[self.exchange.address, *(addresses[peer] for peer in sorted(addresses))]))
        return list(told.values())

    def begin(self) -> None:
        """Have the others forget all batches. Raises StageRankLost."""
        self._tell(Begin())

    def step(self, batch: Batch, rows: Sequence[int], asked: int) -> None:
        """Have the others compute these rows of a batch, as this rank does now, and then the logits of ``asked``.

        Raises StageRankLost.
        """
        # Spans only say how long stages took: the other ranks need none.
        self._tell(Step(batch=msgspec.structs.replace(batch, spans=[]), rows=list(rows), asked=asked))

    def check(self) -> None:
        """Raise StageRankLost if another rank has ended. Only between two steps."""
        self.exchange.check()

    def _tell(self, message: Begin | Step | Meet) -> None:
        told = _encode(message)
        for peer in self.exchange.peers:
            self.exchange.send(peer, told)


def say_loaded(exchange: RankExchange, told: Loaded) -> None:
    """Tell the first rank, and meet the others where they were not joined from the beginning. Raises StageRankLost."""
    exchange.send(0, _encode(msgspec.structs.replace(told, address=exchange.address or None)))
    if exchange.address and not told.problem:
        addresses = _meet.decode(exchange.receive(0)).addresses
        exchange.connect({peer: addresses[peer] for peer in exchange.peers if peer})


def follow(exchange: RankExchange, layers: ShareOfLayers, capacity: int, vocab_size: int = MOST) -> None:
    """Compute the batches that the first rank sends, until that rank ends, which raises StageRankLost."""
    visibility = Visibility(capacity, vocab_size)
    while True:
        message = _step.decode(exchange.receive(0))
        if isinstance(message, Begin):
            layers.forget()
            visibility = Visibility(capacity, vocab_size)
            continue
        # The header counts also where no row survives.
        visibility.apply_header(message.batch)
        if message.rows:
            layers.follow(visibility.view(message.batch, message.rows), message.asked)


# --------------------------------------------------------------------------------------------------------------- linked
# The exchange of rows between the ranks of a stage on several hosts: connections like those between stages.
#
# Every rank has an inbox of its own for the others, and an outbox to each of them. All connections begin with one
# secret, which the engine made for these ranks, and are encrypted where links between stages are. A message is a
# header, which names the sender, and one frame: columns of rows, or a message beside them. Ranks compute the same steps
# in the same order, and a receiver therefore knows which of the two comes next from whom:
#
#     rank 0   sends its columns to all, waits for the others', the next gather ...
#     rank 1   sends its columns to all, waits for the others', the next gather ...
#
# A rank that is ahead may have sent columns of the next gather: each sender's messages wait in a queue of their own.

log = logging.getLogger(__name__)

LOOK_S: Final = 1.0
"""Seconds between two looks at the connections while a rank waits for another one. A rank that has ended is noticed no
sooner."""


class LinkedExchange:
    """One rank's end of the exchange between ``ranks`` of them: it listens at ``inbox``, and connects by ``sockets``.

    ``secret`` admits the others.
    """

    def __init__(self, rank: int, ranks: int, secret: str, inbox: Inbox, sockets: Sockets) -> None:
        self.rank = rank
        self._secret = secret
        self._inbox, self._sockets = inbox, sockets
        self._outboxes: dict[int, Outbox] = {}
        self._came: dict[int, deque[Frame]] = {peer: deque() for peer in range(ranks) if peer != rank}
        self._ended = False
        """Whether a connection of another rank has ended."""
        self._opening = opening(secret)
        self._header = self._opening + bytes([rank])  # an array of three: protocol, secret, rank
        inbox.admit(secret)

    @property
    def peers(self) -> Iterable[int]:
        """The numbers of the other ranks."""
        return self._came

    @property
    def address(self) -> str:
        return self._inbox.address

    @property
    def descriptors(self) -> list[int]:
        return [self._inbox.fileno()]

    def connect(self, addresses: Mapping[int, str]) -> None:
        for peer, address in addresses.items():
            if peer not in self._outboxes:
                self._outboxes[peer] = self._sockets.connect(address, self._secret)

    def gather(self, rows_NW: np.ndarray, bounds: Sequence[int]) -> None:
        """Fill in the other ranks' columns: see ``models.shares.Exchange``. Raises StageRankLost."""
        columns = [slice(bounds[rank], bounds[rank + 1]) for rank in range(len(bounds) - 1)]
        own = columns[self.rank]
        if own.start < own.stop:
            content = np.ascontiguousarray(rows_NW[:, own]).data.cast("B")
            for peer in self.peers:
                self._outboxes[peer].send(self._header, content)
        for peer in self.peers:
            theirs = columns[peer]
            if theirs.start < theirs.stop:
                came = self._next(peer)
                rows = rows_NW[:, theirs]
                if len(came) != rows.nbytes:
                    raise StageRankLost(f"rank {peer} of the stage has sent {len(came)} bytes of {rows.nbytes}")
                rows[:] = np.frombuffer(came, np.float32).reshape(rows.shape)

    def send(self, peer: int, message: bytes) -> None:
        """Send a message beside the rows."""
        self._outboxes[peer].send(self._header, message)

    def receive(self, peer: int) -> bytes:
        """The next message of another rank. Raises StageRankLost."""
        return bytes(self._next(peer))

    def check(self) -> None:
        """Raise StageRankLost if another rank has ended, or is out of reach."""
        self._take_in()
        if problem := self._problem:
            raise StageRankLost(problem)

    def _next(self, peer: int) -> Frame:
        came = self._came[peer]
        while not came:
            self._inbox.wait(time.monotonic() + LOOK_S)
            self._take_in()
            # What has come counts also if its sender has ended since.
            if not came and (problem := self._problem):
                raise StageRankLost(problem)
        return came.popleft()

    def _take_in(self) -> None:
        """Queue the messages that have arrived."""
        for frames in self._inbox.take():
            header = frames[0]
            # A header of another length is taken for this rank's own, which is no sender: it is refused below.
            sender = header[-1] if len(header) == len(self._header) else self.rank
            if begins(header, self._opening) and sender in self._came and len(frames) == 2:
                self._came[sender].append(frames[1])
            else:
                log.warning("rank %d refused a frame that no rank of its stage has sent", self.rank)
        self._ended |= bool(self._inbox.broken())

    @property
    def _problem(self) -> str:
        """The reason why no more comes from another rank, or gets there; empty where nothing is known."""
        if self._ended:
            return "another rank of the stage has ended"
        for peer, outbox in self._outboxes.items():
            if cause := outbox.unreached:
                return f"rank {peer} of the stage is out of reach: {cause}"
        return ""
