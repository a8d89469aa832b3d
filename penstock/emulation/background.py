"""Computing at idle priority, for emulated devices that share this host's few processors."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple

from penstock.emulation.priority import yield_to_others
from penstock.messages import Batch, Cancel, Features
from penstock.stage.driver import Core, Processed


class Outcome(NamedTuple):
    value: Any = None
    error: BaseException | None = None


class BackgroundCore:
    """Has another core process its batches in a thread that yields to every other.

    A modelled device computes without disturbing its neighbours' network stacks. Here all stages end a step together:
    while some compute the next batch, others still have to send theirs, and must not wait for a processor.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self.is_last = core.is_last
        self._tasks: SimpleQueue[Callable[[], Any] | None] = SimpleQueue()
        self._outcomes: SimpleQueue[Outcome] = SimpleQueue()
        threading.Thread(target=self._work, name="penstock background", daemon=True).start()

    def close(self) -> None:
        """Stop the thread; nothing is processed after that."""
        self._tasks.put(None)

    def cancel(self, message: Cancel) -> None:
        self._core.cancel(message)

    def missing_features(self, batch: Batch) -> set[tuple[int, int]]:
        return self._core.missing_features(batch)

    def add_features(self, features: Features, states: Any) -> None:
        self._do(partial(self._core.add_features, features, states))

    def process(self, batch: Batch, hidden: Any) -> Processed:
        processed: Processed = self._do(partial(self._core.process, batch, hidden))
        return processed

    def tapped(self) -> tuple[Features, Any] | None:
        return self._core.tapped()

    def _do(self, task: Callable[[], Any]) -> Any:
        """Have the thread run the task, and wait. Two queues are faster than the futures of an executor."""
        self._tasks.put(task)
        outcome = self._outcomes.get()
        if outcome.error is not None:
            raise outcome.error
        return outcome.value

    def _work(self) -> None:
        yield_to_others()
        while (task := self._tasks.get()) is not None:
            try:
                self._outcomes.put(Outcome(task()))
            # Whatever it is, the thread that waits in ``_do`` raises it; this one has to stay alive for the next task.
            except BaseException as error:
                self._outcomes.put(Outcome(error=error))
