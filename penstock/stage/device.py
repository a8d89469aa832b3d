"""What a stage runs on: here the process's own device, and links that have delivered what is received from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from penstock.messages import Message, Rows


class Computation(NamedTuple):
    """One batch on a device: when it was over, and how many seconds it took and, where they are modelled, should have.

    ``end`` is on the clock of the driver.
    """

    end: float
    computed: float
    modelled: float = 0.0


class Device:
    """Computes a stage's batches, and nothing else. Each takes as long as it does."""

    free_at = 0.0
    """When it has done what it has begun."""
    shared = False
    """Whether a message may give it something to do besides the stage's batches."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock

    def computed(self, start: float, rows: Rows, alive: Sequence[int]) -> Computation:
        """A batch, begun at ``start``, has just been computed; ``alive`` are the indices of its surviving rows."""
        seconds = self._clock() - start
        return Computation(start + seconds, seconds)

    def on_message(self, message: Message, arrives: float) -> bool:
        """Take in a message that is not the stage's. Returns whether it is the device's."""
        return False

    @property
    def due(self) -> float | None:
        """When it can do something besides the stage's batches; None while there is nothing."""
        return None

    def take_turn(self, ready_since: float | None) -> Message | None:
        """Do something else that is due, if it comes before the batch that is ready since then (None: no batch is).

        Returns what the engine is to be told of it; None if nothing has been done.
        """
        return None


class Link:
    """One direction of a link. What is received has arrived."""

    def sending(self, message: Message, rows: int = 0) -> float:
        """Seconds for which a message with the hidden states of so many rows keeps the link busy."""
        return 0.0

    def arrival(self, now: float, sending: float) -> float:
        """The clock's moment at which what is sent now arrives; 0 if that is when it is received."""
        return 0.0


REAL_LINK: Final = Link()


class Links(NamedTuple):
    """Those on which a stage sends."""

    down: Link = REAL_LINK
    up: Link = REAL_LINK
    to_drafter: Link = REAL_LINK


REAL_LINKS: Final = Links()
