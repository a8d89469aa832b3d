"""The progress of a stage in reading its weights, reported while it loads."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from torch import Tensor

Listener = Callable[[int, int], None]
"""Called with how many numbers have been read, and how many there are."""

SECONDS: Final = 0.1
"""Seconds between two reports."""


class Reading:
    """Counts the numbers that are read from tensors, on any threads."""

    def __init__(self, total: int, listener: Listener) -> None:
        self._total = total
        self._listener = listener
        self._read = 0
        self._told = -math.inf
        self._lock = threading.Lock()

    def add(self, numbers: int) -> None:
        with self._lock:
            self._read += numbers
            if time.monotonic() > self._told + SECONDS:
                self._told = time.monotonic()
                self._listener(self._read, self._total)

    def end(self) -> None:
        """Report that everything has been read. A stage at one end of the model skips tensors of the other end."""
        self._listener(self._total, self._total)


class CountedTensor:
    """A tensor that has not been read; reading it is counted."""

    def __init__(self, tensor: Any, reading: Reading) -> None:
        self._tensor = tensor
        self._reading = reading

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tensor, name)

    def __getitem__(self, index: Any) -> Tensor:
        found: Tensor = self._tensor[index]
        self._reading.add(found.numel())
        return found


@contextmanager
def counted(tensors: dict[str, Any], listener: Listener | None) -> Iterator[dict[str, Any]]:
    """These tensors, wrapped so that ``listener`` is told within the block how much of them has been read."""
    if listener is None:
        yield tensors
        return
    reading = Reading(sum(math.prod(tensor.get_shape()) for tensor in tensors.values()), listener)
    yield {name: CountedTensor(tensor, reading) for name, tensor in tensors.items()}
    reading.end()
