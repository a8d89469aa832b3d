"""The progress of stages and drafter in reading their weights, and how it is shown."""

from __future__ import annotations

from typing import Final, Self

from rich.console import Console
from rich.progress import BarColumn, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn

from penstock.messages import Loading, Started
from penstock.terminal import progress_of

FETCH: Final = "fetch"
"""Stands for a pipeline's name while a host fetches missing parts of the checkpoint, counted in bytes."""


class LoadingCount:
    """The weights that all processes have read, host by host, and the memory of those that have started.

    Use it as a ``with`` block around their start, and as ``on_loading`` of ``ProcessExecutor``.
    """

    def __init__(self) -> None:
        self._heard: dict[str, dict[tuple[str, int], Loading]] = {}
        """Host's name in plans -> (pipeline, stage) -> its latest report."""
        self._started: list[Started] = []

    def __call__(self, host: str, pipeline: str, said: Loading | Started) -> None:
        if isinstance(said, Started):
            self._started.append(said)
        elif pipeline == FETCH:
            self.show(host, "fetching weights", said.read, said.total)
        else:
            self._heard.setdefault(host, {})[pipeline, said.stage] = said
            self.show(host, "loading weights", *self.read(host))

    def show(self, host: str, does: str, done: int, total: int) -> None:
        """Called whenever a host has read or fetched more."""

    def read(self, host: str) -> tuple[int, int]:
        """How many numbers the processes on a host have read, and how many there are, as far as they have reported."""
        heard = self._heard.get(host, {}).values()
        return sum(one.read for one in heard), sum(one.total for one in heard)

    @property
    def held(self) -> tuple[int, int]:
        """Bytes of weights, and of KV cache, that the started processes hold."""
        return sum(one.weight_bytes for one in self._started), sum(one.kv_bytes for one in self._started)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        pass


class LoadingBar(LoadingCount):
    """A bar for each host, or a line every few seconds where ``console`` is no terminal."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
        self._progress = progress_of(console, *columns)
        self._waits: TaskID | None = self._progress.add_task("starting", total=None, in_percent=True)
        self._bars: dict[str, TaskID] = {}
        """Host's name in plans -> its bar."""

    def show(self, host: str, does: str, done: int, total: int) -> None:
        if host not in self._bars:
            self._bars[host] = self._waits if self._waits is not None else self._progress.add_task("", in_percent=True)
            self._waits = None
        said = f"{host}: {does}" if host else does
        self._progress.update(self._bars[host], description=said, completed=done, total=total)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._progress.stop()
