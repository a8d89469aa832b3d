"""How much of the KV cache a batch reads, from its rows' positions: a row at position p attends to p + 1 tokens."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.cluster.timing import NOTHING, Attended
from penstock.messages import Rows


def attended_by(rows: Rows, alive: Sequence[int]) -> Attended:
    """Attention pairs and distinct tokens read by the rows ``alive``.

    Each request's tokens count as read once, up to its deepest row: the branches of a draft tree are short beside that.
    """
    if not alive:
        return NOTHING
    pairs, longest = len(alive), dict[int, int]()
    for row in alive:
        position, request = rows.positions[row], rows.requests[row]
        pairs += position
        if position >= longest.get(request, 0):
            longest[request] = position + 1
    return Attended(pairs, sum(longest.values()))
