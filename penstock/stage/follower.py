"""The ranks behind the first of a stage: they hold shares of its layers, and compute what the first one says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Protocol

import msgspec

from penstock.messages import MOST, MOST_RANKS, Address, Batch
from penstock.stage.exchange import RankExchange
from penstock.stage.visibility import BatchView, Visibility


class Begin(msgspec.Struct, tag="begin", kw_only=True):
    """Forget all batches: a stream begins."""


class Step(msgspec.Struct, tag="step", kw_only=True):
    """The next batch, and which of its ``rows`` are computed; then the logits of ``asked`` of them."""

    batch: Batch
    rows: list[int]
    asked: int


class Loaded(msgspec.Struct, tag="loaded", kw_only=True):
    """A rank has loaded its share, which takes so many bytes. A ``problem`` says why it could not.

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
    """The first rank's hold on the others."""

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
        self._tell(Begin())

    def step(self, batch: Batch, rows: Sequence[int], asked: int) -> None:
        """Have the others compute these rows of a batch, as this rank does now, and then the logits of ``asked``.

        Raises StageRankLost.
        """
        # Spans are the stages' notes of their times, and no rank's matter.
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
    """Compute what the first rank says until it ends, which raises StageRankLost."""
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
