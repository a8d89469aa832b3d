"""The bar that a person sees while stages and drafter read their weights."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn

from penstock.messages import Loading, Started
from penstock.progress import progress_of


class LoadingBar:
    """How much of their weights all processes have read; a line every few seconds where ``console`` is no terminal.

    In a ``with`` block, which ends when they have started. Call it with what each says (``ProcessHost.on_loading``).
    """

    def __init__(self, console: Console) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
        self._progress = progress_of(console, *columns)
        self._task = self._progress.add_task("starting", total=None, in_percent=True)
        self._heard: dict[tuple[str, int], Loading] = {}
        self._started: list[Started] = []

    def __call__(self, pipeline: str, said: Loading | Started) -> None:
        if isinstance(said, Started):
            self._started.append(said)
            return
        self._heard[pipeline, said.stage] = said
        read, total = self.read
        self._progress.update(self._task, description="loading weights", completed=read, total=total)

    @property
    def read(self) -> tuple[int, int]:
        """How many numbers have been read, and of how many, as far as the processes have said."""
        return sum(one.read for one in self._heard.values()), sum(one.total for one in self._heard.values())

    @property
    def held(self) -> tuple[int, int]:
        """Bytes of weights, and of room for keys and values, that the processes hold that have started."""
        return sum(one.weight_bytes for one in self._started), sum(one.kv_bytes for one in self._started)

    def __enter__(self) -> LoadingBar:
        self._progress.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._progress.stop()
