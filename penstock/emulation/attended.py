"""What the rows of a batch attend to, by their positions: each sees its path, which is as long as its position says."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.cluster.timing import NOTHING, Attended
from penstock.messages import Rows


def attended_by(rows: Rows, alive: Sequence[int]) -> Attended:
    """Of the rows ``alive``. A request's tokens are read once, up to its longest path: branches are short beside it."""
    if not alive:
        return NOTHING
    pairs, longest = len(alive), dict[int, int]()
    for row in alive:
        position, request = rows.positions[row], rows.requests[row]
        pairs += position
        if position >= longest.get(request, 0):
            longest[request] = position + 1
    return Attended(pairs, sum(longest.values()))
