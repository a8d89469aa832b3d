"""The device and the links of a stage; here the real ones, which add no time of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from penstock.messages import Message, Rows


class Computation(NamedTuple):
    """The time of one batch on a device.

    ``end`` is when it was over, on the driver's clock; ``computed`` are the seconds that it took, and ``modelled``
    those that the device is modelled to take (0 for a real one).
    """

    end: float
    computed: float
    modelled: float = 0.0


class Device:
    """Computes a stage's batches and nothing else, each for as long as it takes."""

    free_at = 0.0
    """When the device is done with everything that it has begun."""
    shared = False
    """Whether messages may give it other work besides the stage's batches."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock

    def computed(self, start: float, rows: Rows, alive: Sequence[int]) -> Computation:
        """A batch that began at ``start`` has just been computed; ``alive`` are the indices of its surviving rows."""
        seconds = self._clock() - start
        return Computation(start + seconds, seconds)

    def on_message(self, message: Message, arrives: float) -> bool:
        """Take in a message that is not for the stage. Returns whether it was for the device."""
        return False

    @property
    def due(self) -> float | None:
        """When it can do something besides the stage's batches; None while there is nothing to do."""
        return None

    def take_turn(self, ready_since: float | None) -> Message | None:
        """Do other work that is due, if it comes before the batch that is ready since then (None: no batch is ready).

        Returns the message that tells the engine of it; None if nothing has been done.
        """
        return None


class Accelerator(Device):
    """A GPU, which goes on computing when Python has queued a batch's work and turns to the next.

    ``finish`` waits for the end of all that is queued. Without it a batch of which nothing comes back, such as a piece
    of a prompt on the last stage, would seem to take no time, and its time would be booked on the batch behind it.
    """

    def __init__(self, clock: Callable[[], float], finish: Callable[[], None]) -> None:
        super().__init__(clock)
        self._finish = finish

    def computed(self, start: float, rows: Rows, alive: Sequence[int]) -> Computation:
        self._finish()
        return super().computed(start, rows, alive)


class Link:
    """One direction of a link. On a real one, a message has arrived when it is received."""

    def sending(self, message: Message, rows: int = 0) -> float:
        """Seconds for which a message with the hidden states of ``rows`` rows keeps the link busy."""
        return 0.0

    def arrival(self, now: float, sending: float) -> float:
        """When a message that is sent now arrives, on the driver's clock; 0 if that is when it is received."""
        return 0.0


REAL_LINK: Final = Link()


class Links(NamedTuple):
    """The links on which a stage sends: to the next stage, to the previous one, and to the drafter."""

    down: Link = REAL_LINK
    up: Link = REAL_LINK
    to_drafter: Link = REAL_LINK


REAL_LINKS: Final = Links()
