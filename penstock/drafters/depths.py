"""How far a token has got in the target's pipeline, and at which level SPD's module therefore sees it.

Source: Wang et al., Speculative Pipeline Decoding (arXiv 2605.30852), section 3.7 and appendix A; the anchors are those
of yuyijiong/speculative_pipeline_decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Depths:
    """What the module reads of a token that has passed so many stages.

    ``levels`` [stages + 1] is its level by number of stages; ``reading`` the levels that read states of the target at
    all. A token's depth is what it would be if a batch entered every step and left its stage at the end of it: it does
    not depend on when anything arrives (SPD, Eq. 2 and 3). ``lag`` steps less leave time for the features' way;
    ``asked`` is the depth of a token that is just entering, 1 where the module looks at it once it has passed a stage
    (SPD, section 4.4). A module with ``memory`` can be asked about such tokens alone: whatever else it is asked
    about is computed as one.
    """

    levels: Sequence[int]
    reading: frozenset[int]
    lag: int = 0
    asked: int = 0
    memory: bool = False

    def level(self, steps: int) -> int:
        """The level of a token that entered so many batches ago."""
        return self.levels[min(max(steps - self.lag, 0) + self.asked, len(self.levels) - 1)]

    @property
    def last(self) -> int:
        return self.levels[-1]


def levels_after(layers: Sequence[tuple[int, int]], levels: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The level of a token after 0, 1, ... of the stages: the deepest that reads no state further on, else the first.

    ``layers`` [first, last) are each stage's, ``levels`` the target's hidden states that each level reads, numbered as
    in ``SpeculatorCheckpoint``: one more than there are layers is the last before its norm; the last stage gives both.
    """
    needed = [min(max(reads), layers[-1][1]) for reads in levels]
    return tuple(max((i for i, state in enumerate(needed) if state <= done), default=0) for done in layers_done(layers))


def layers_done(layers: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    """Layers that a token has behind it after 0, 1, ... of the stages with ``layers`` [first, last).

    The last stage alone gives the states after the final norm, even where it has no layer.
    """
    total = layers[-1][1]
    return (0, *(min(last, total - 1) for _, last in layers[:-1]), total)
