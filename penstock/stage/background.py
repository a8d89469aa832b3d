"""Computing at idle priority, for emulated stages that share this host's few cores."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from penstock.messages import Candidates, Pick, Sampling
from penstock.stage.core import Layers
from penstock.stage.visibility import BatchView


class BackgroundLayers:
    """Runs another stage's ``Layers`` in a thread that yields to every other.

    A modelled device computes without disturbing its neighbours' network stacks. Here all stages end a step together:
    while some compute the next batch, others still have to hand theirs over, and must not wait for a core.
    """

    def __init__(self, layers: Layers) -> None:
        self._layers = layers
        self._thread = ThreadPoolExecutor(max_workers=1, initializer=yield_to_others)

    def forward(self, view: BatchView, hidden: Any) -> Any:
        return self._thread.submit(self._layers.forward, view, hidden).result()

    def pick(self, view: BatchView, hidden: Any, wanted: Sequence[int], samplings: Sequence[Sampling]) -> list[Pick]:
        return self._thread.submit(self._layers.pick, view, hidden, wanted, samplings).result()

    def candidates(
        self, view: BatchView, hidden: Any, wanted: Sequence[int], samplings: Sequence[Sampling], count: int
    ) -> list[Candidates]:
        return self._thread.submit(self._layers.candidates, view, hidden, wanted, samplings, count).result()

    def features(self, hidden: Any) -> Any:
        return self._thread.submit(self._layers.features, hidden).result()


def yield_to_others() -> None:
    """Linux's idle policy for the calling thread; elsewhere nothing."""
    if hasattr(os, "SCHED_IDLE"):
        with contextlib.suppress(PermissionError):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
