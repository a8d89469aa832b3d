"""How far stages and drafter are with reading their weights, and what a person sees of it."""

from __future__ import annotations

from typing import Self

from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn

from penstock.messages import Loading, Started
from penstock.progress import progress_of


class LoadingCount:
    """How much of their weights all processes have read, and what those hold that have started.

    In a ``with`` block, which ends when they have. Call it with what each says (``ProcessHost.on_loading``).
    """

    def __init__(self) -> None:
        self._heard: dict[tuple[str, int], Loading] = {}
        self._started: list[Started] = []

    def __call__(self, pipeline: str, said: Loading | Started) -> None:
        if isinstance(said, Started):
            self._started.append(said)
        else:
            self._heard[pipeline, said.stage] = said
            self.show(*self.read)

    def show(self, read: int, total: int) -> None:
        """Called whenever more has been read."""

    @property
    def read(self) -> tuple[int, int]:
        """How many numbers have been read, and of how many, as far as the processes have said."""
        return sum(one.read for one in self._heard.values()), sum(one.total for one in self._heard.values())

    @property
    def held(self) -> tuple[int, int]:
        """Bytes of weights, and of room for keys and values, that the processes hold that have started."""
        return sum(one.weight_bytes for one in self._started), sum(one.kv_bytes for one in self._started)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        pass


class LoadingBar(LoadingCount):
    """A bar, or a line every few seconds where ``console`` is no terminal."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
        self._progress = progress_of(console, *columns)
        self._task = self._progress.add_task("starting", total=None, in_percent=True)

    def show(self, read: int, total: int) -> None:
        self._progress.update(self._task, description="loading weights", completed=read, total=total)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._progress.stop()
