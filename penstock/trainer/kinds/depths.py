"""Levels at which SPD's module sees the tokens of a sequence, by the number of tokens in flight.

Source: Wang et al., Speculative Pipeline Decoding (arXiv 2605.30852), section 3.7 and appendix A.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile


@dataclass(frozen=True)
class Block:
    """All tokens of a sequence at one level.

    A row that is asked has passed ``depth`` stages. It sees the j-th token before it at level ``near[j]``, and all
    earlier tokens at the deepest level. With None the rows of this block are only seen.
    """

    level: int
    depth: int
    near: tuple[int, ...] | None


def lay_out(levels: Sequence[int], fill: int, asked: int = 0, only: bool = False) -> tuple[Block, ...]:
    """The blocks that occur in a pipeline whose ``fill`` newest tokens are in flight, from shallow to deep.

    ``levels`` [stages + 1] are the levels by depth. The newest token has passed ``asked`` stages, the one before it one
    more, and so on; tokens beyond ``fill`` have passed all stages. ``only``: only the newest token is asked; otherwise
    a block is asked at the smallest depth of its level. An example for levels 0 1 1 2 2 and a full pipeline of four
    stages:

        asked at level 0  depth 0   sees  ... 2  2  1  1  0
        asked at level 1  depth 1   sees     ... 2  2  1  1
        asked at level 2  depth 3   sees        ... 2  2  2
    """
    deepest = levels[-1]
    seen = [level if depth < fill + asked else deepest for depth, level in enumerate(levels)]
    found: list[Block] = []
    for level in sorted(set(seen[asked:])):
        depth = seen.index(level, asked)
        near = tuple(takewhile(lambda one: one != deepest, seen[depth:]))
        found.append(Block(level, depth, near if not only or not found else None))
    return tuple(found)
