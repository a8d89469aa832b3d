"""Computing at idle priority, for emulated devices that share this host's few processors."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from penstock.messages import Batch, Cancel, Candidates, Features, Pick
from penstock.priority import yield_to_others
from penstock.stage.driver import Core


class BackgroundCore:
    """Has another core process its batches in a thread that yields to every other.

    A modelled device computes without disturbing its neighbours' network stacks. Here all stages end a step together:
    while some compute the next batch, others still have to hand theirs over, and must not wait for a processor.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self.is_last = core.is_last
        self._thread = ThreadPoolExecutor(max_workers=1, initializer=yield_to_others)

    def cancel(self, message: Cancel) -> None:
        self._core.cancel(message)

    def lacks(self, batch: Batch) -> set[tuple[int, int]]:
        return self._core.lacks(batch)

    def take(self, features: Features, states: Any) -> None:
        self._thread.submit(self._core.take, features, states).result()

    def process(self, batch: Batch, hidden: Any) -> tuple[list[int], Any, list[Pick], list[Candidates]]:
        return self._thread.submit(self._core.process, batch, hidden).result()

    def tapped(self) -> tuple[Features, Any] | None:
        return self._core.tapped()
