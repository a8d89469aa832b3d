"""Stages that lie: what they send to the next one is not what their layers have computed.

A worker's stages do so when ``lying`` has prepared its environment. The lie is named in a file, which is read anew for
each batch, so that the same worker can tell one after the other; an empty file is the truth.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from msgspec.structs import replace

from penstock.messages import Batch, Opened, Rows, Sampling
from penstock.stage.driver import Outgoing

FILE: Final = "PENSTOCK_TEST_LIE"
"""The environment variable that holds the file's path."""
ROOT: Final = Path(__file__).parents[1]
Sent = tuple[Batch, memoryview]


def lying(folder: Path, lie: Path) -> dict[str, str]:
    """The environment of a worker whose stages tell the lie that is named in a file."""
    folder.mkdir()
    lie.write_text("")
    (folder / "sitecustomize.py").write_text("from tests.lying_stage import install\n\ninstall()\n")
    return {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", FILE: str(lie)}


def install() -> None:
    from penstock.pipeline.worker import Worker

    honest = Worker._frames

    def frames(worker: Worker, outgoing: Outgoing) -> Any:
        name = Path(os.environ[FILE]).read_text()
        if name not in LIES or not isinstance(outgoing.message, Batch) or outgoing.tensor is None:
            return honest(worker, outgoing)
        batch, tensor = LIES[name](outgoing.message, outgoing.tensor)
        width, worker._leaving = worker._leaving, batch.width or worker._leaving
        header, *_ = honest(worker, outgoing._replace(message=batch, tensor=tensor))
        worker._leaving = width
        return header, tensor

    Worker._frames = frames  # type: ignore[method-assign]


def float32(value: float) -> Callable[[Batch, memoryview], Sent]:
    """Make the last number of the last row another one."""

    def told(batch: Batch, tensor: memoryview) -> Sent:
        numbers = bytearray(tensor)
        memoryview(numbers).cast("f")[-1] = value
        return batch, memoryview(numbers)

    return told


def changed(**fields: Callable[[Batch], Any]) -> Callable[[Batch, memoryview], Sent]:
    def told(batch: Batch, tensor: memoryview) -> Sent:
        return replace(batch, **{name: make(batch) for name, make in fields.items()}), tensor

    return told


def rows(**columns: Callable[[int], int]) -> Callable[[Batch, memoryview], Sent]:
    """Change every entry of some columns."""

    def other(batch: Batch) -> Rows:
        return replace(
            batch.rows, **{name: [make(n) for n in getattr(batch.rows, name)] for name, make in columns.items()}
        )

    return changed(rows=other)


def with_foreign_row(batch: Batch) -> Rows:
    """The rows, and a dead one of a request that is not there."""
    rows = batch.rows
    columns = (rows.nodes, rows.slots, rows.parents, rows.positions, rows.tokens)
    return Rows([*rows.requests, 999], *([*column, column[-1]] for column in columns))


LIES: Final[Mapping[str, Callable[[Batch, memoryview], Sent]]] = {
    "a NaN": float32(float("nan")),
    "an infinity": float32(float("inf")),
    "too few states": lambda batch, tensor: (batch, tensor[:-4]),
    "another width": changed(width=lambda batch: 8),
    "no row of it": changed(alive=lambda batch: [len(batch.rows) + 7]),
    "rows twice": changed(alive=lambda batch: batch.alive * 2),
    "another stream": changed(stream=lambda batch: batch.stream + 5),
    "a request that nobody opened": rows(requests=lambda number: number + 999),
    "a wanted row of a request that nobody opened": changed(
        rows=with_foreign_row, wanted=lambda batch: [*batch.wanted, len(batch.rows)]
    ),
    "slots that are not there": rows(slots=lambda slot: slot + 10**6),
    "positions that are not there": rows(positions=lambda position: position + 10**6),
    "tokens of another model": rows(tokens=lambda token: token + 10**6),
    "a request opened twice": changed(
        opened=lambda batch: [*batch.opened, *batch.opened] or [Opened(0, Sampling())] * 2
    ),
    "other nodes": rows(nodes=lambda node: node + 10**6),
    "nothing wanted": changed(wanted=lambda batch: []),
    "candidates": changed(candidates=lambda batch: 3),
    "a number that no message holds": rows(nodes=lambda node: -1),
}
"""Each lie by its name: the batch and states that are sent in the place of the true ones."""
