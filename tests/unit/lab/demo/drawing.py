"""Batches and nodes as the demo's observers see them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.messages import Batch, Rows
from penstock.tree import Node


def batch(stream: int, nodes: Mapping[int, Sequence[int]], wanted: Sequence[int] | None = None) -> Batch:
    """A batch with rows by position; successors of all nodes, or of the ``wanted`` ones, are asked for."""
    rows = Rows()
    for position, ids in nodes.items():
        for node_id in ids:
            rows.append(request=0, node=node_id, slot=node_id, parent=-1, position=position, token=node_id)
    asked = [row for row, node_id in enumerate(rows.nodes) if wanted is None or node_id in wanted]
    return Batch(stream=stream, rows=rows, wanted=asked)


def node(node_id: int, position: int = 0) -> Node:
    return Node(node_id, token=node_id, position=position, slot=node_id)


def plain(table: Any, width: int = 80) -> list[str]:
    """Return a table's lines without colours."""
    from rich.console import Console

    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(table)
    return [line.rstrip() for line in capture.get().splitlines()]
