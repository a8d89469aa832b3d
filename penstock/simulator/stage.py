"""The computation of a simulated stage: nothing but the target's picks, which the script knows."""

from __future__ import annotations

from typing import Any

from penstock.messages import Batch, Cancel, Candidates, Features, SampledToken
from penstock.simulator.script import Script
from penstock.stage.cancels import Cancels
from penstock.stage.visibility import ProtocolError


class SimulatedCore:
    """Takes the place of a ``StageCore`` in a ``StageDriver``: drops dead rows, and the last stage picks from the
    script.

    Off the target's path the script's pick means nothing, and nothing asks for it: only the root's pick is followed.
    """

    def __init__(self, script: Script, is_last: bool) -> None:
        self.is_last = is_last
        self._script = script
        self._cancels = Cancels()

    def cancel(self, message: Cancel) -> None:
        self._cancels.add(message)

    def missing_features(self, batch: Batch) -> set[tuple[int, int]]:
        return set()

    def add_features(self, features: Features, states: Any) -> None:
        pass

    def tapped(self) -> None:
        return None

    def process(self, batch: Batch, hidden: Any) -> tuple[list[int], Any, list[SampledToken], list[Candidates]]:
        if batch.stream != self._cancels.next_stream:
            raise ProtocolError(f"batch {batch.stream} arrived where {self._cancels.next_stream} was due")
        rows = self._cancels.surviving(batch)
        self._cancels.passed(batch.stream)
        picks = []
        if self.is_last:
            columns, alive = batch.rows, set(rows)
            picks = [
                SampledToken(columns.nodes[row], self._script.after(columns.requests[row], columns.positions[row]))
                for row in batch.wanted
                if row in alive
            ]
        return rows, hidden, picks, []
