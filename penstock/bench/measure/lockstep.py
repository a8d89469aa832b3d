"""The timesteps of a run in ideal lockstep: stages of equal speed, no links, no drafting time, no overhead."""

from __future__ import annotations


class Lockstep:
    """Counts the timesteps of one request from the order of its events alone.

    A timestep is one stage's time for any batch. Batch s enters at t(s), and its result is there ``stages`` later:

        t(s) = max(t(s-1) + 1, t(r) + stages for every result r with picks that had arrived when s was submitted)

    so a batch waits only for the one before it and for what the engine knew when it composed it. A result without
    picks told it nothing: its rows were dropped, and it came out earlier than any lockstep has it.

        stages = 3     plain: t = 0, 3, 6, ...     every batch waits for the result before it
                       full:  t = 0, 1, 2, 3, ...  result 0 is there at 3, before batch 3 enters

    ``timesteps`` runs from the result that gave the first token to the one that gave the last, as a bench's seconds
    do, steps in which nothing enters included. It is the K of SPD's equivalent acceptance length n N / K (section 4.2,
    equation 4), of which plain decoding has exactly 1.
    """

    def __init__(self, stages: int) -> None:
        self._stages = stages
        self._earliest = 0
        self._out: dict[int, int] = {}
        self._now = 0
        self._first: int | None = None
        self._last = 0

    def submitted(self, stream: int) -> None:
        self._out[stream] = self._earliest + self._stages
        self._earliest += 1

    def arrived(self, stream: int, picks: bool) -> None:
        out = self._out.pop(stream)
        if picks:
            self._now = out
            self._earliest = max(self._earliest, out)

    def committed(self) -> None:
        """Note that the result that has just arrived committed tokens."""
        self._first = self._now if self._first is None else self._first
        self._last = self._now

    @property
    def timesteps(self) -> int:
        """Timesteps from the first token to the last; 0 while there is no second token."""
        return 0 if self._first is None else self._last - self._first
