"""How far a token has got in the target's pipeline, and hence the level at which SPD's module sees it.

Source: Wang et al., Speculative Pipeline Decoding (arXiv 2605.30852), section 3.7 and appendix A; the anchors are those
of yuyijiong/speculative_pipeline_decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Depths:
    """Maps the number of stages that a token has passed to the level at which the module reads it.

    ``levels`` [stages + 1]: the level by number of stages. ``reading``: the levels that read states of the target at
    all. A token's depth is computed as if a batch entered every step and left its stage at the end of it, so that it
    does not depend on when anything arrives (SPD, Eq. 2 and 3). ``lag``: steps subtracted to leave time for the
    transfer of features. ``asked``: the depth of a token that is just entering; 1 where the module looks at it once it
    has passed a stage (SPD, section 4.4). ``memory``: the module can be asked about such tokens alone, so that any node
    asked about is computed as one of them.
    """

    levels: Sequence[int]
    reading: frozenset[int]
    lag: int = 0
    asked: int = 0
    memory: bool = False

    def level(self, steps: int) -> int:
        """The level of a token that entered ``steps`` batches ago."""
        return self.levels[min(max(steps - self.lag, 0) + self.asked, len(self.levels) - 1)]

    @property
    def last(self) -> int:
        return self.levels[-1]


def levels_after(layers: Sequence[tuple[int, int]], levels: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The level of a token after 0, 1, ... stages: the deepest that needs no state further on, or else the first.

    ``layers`` are each stage's [first, last). ``levels`` are the target's hidden states that each level reads, numbered
    as in ``SpeculatorCheckpoint``: the last number is one more than there are layers, the state before the final norm.
    The last stage provides both the state after the norm and the one before it.
    """
    needed = [min(max(reads), layers[-1][1]) for reads in levels]
    return tuple(max((i for i, state in enumerate(needed) if state <= done), default=0) for done in layers_done(layers))


def layers_done(layers: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    """Number of layers behind a token after 0, 1, ... of the stages with ``layers`` [first, last).

    Only the last stage provides the states after the final norm, even where it has no layer.
    """
    total = layers[-1][1]
    return (0, *(min(last, total - 1) for _, last in layers[:-1]), total)
