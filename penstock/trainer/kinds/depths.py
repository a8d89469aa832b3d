"""At which levels SPD's module sees the tokens of a sequence at once, by how many are under way in the pipeline.

Source: Wang et al., Speculative Pipeline Decoding (arXiv 2605.30852), section 3.7 and appendix A.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile


@dataclass(frozen=True)
class Block:
    """Every token of a sequence at one level.

    A row that is asked has passed ``depth`` stages. It sees the token j before it at level ``near[j]``, and all tokens
    before these at the deepest level. None: rows of this block are only seen.
    """

    level: int
    depth: int
    near: tuple[int, ...] | None


def lay_out(levels: Sequence[int], fill: int, asked: int = 0, only: bool = False) -> tuple[Block, ...]:
    """The blocks that occur in a pipeline whose ``fill`` newest tokens are under way, from shallow to deep.

    ``levels`` [stages + 1] are those by depth. The newest token has passed ``asked`` stages, one before it one more,
    and so on; whoever would have passed ``fill`` more is done with all. ``only``: none but the newest are asked;
    otherwise a block is asked at the smallest depth of its level. Levels 0 1 1 2 2 and a full pipeline of four stages:

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
