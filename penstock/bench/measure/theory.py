"""SPD's theoretical speed-ups (Wang et al., Speculative Pipeline Decoding, section 4.2), for every strategy.

With N tokens in K pipeline steps over n stages the equivalent acceptance length is L' = n N / K (equation 4), where
bubbles count as steps (``lockstep.Lockstep``). Plain decoding has 1, and a tree verified in one batch its acceptance
length. L' is the theoretical speed-up where drafting takes place beside the stages' steps. For a target with L layers
and a drafter with L_s layers of the same kind:

    S_spd   = L' x min(1, L / (L_s n))  drafts from the tokens' states when a step begins
    S_ppsd  = L' x L / (L_s n + L)      drafts from their states when it ends, which every step waits for
    S_eagle = L' x L / (L_s m + L)      drafts m levels one after the other while the stages wait

The paper prints S_spd = L', under the condition of its section 3.4 that L_s is at most L / n. A drafter with more
layers takes longer than a stage, and every step waits for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.speculation import SpeculativeConfig
from penstock.engine.resolve import Resolved
from penstock.strategies.static_tree import StaticTreeOptions


def drafting_factor(setup: Resolved, config: SpeculativeConfig | None) -> float:
    """The theoretical speed-up divided by L': below 1 where the stages have to wait for a learned drafter.

    The paper has no formula for other drafters, and their time is left out. L is the number of layers of the model
    whose times are emulated, if any are.
    """
    if config is None or setup.speculator is None:
        return 1.0
    model = setup.cluster.as_model if setup.cluster is not None else None
    target = model.layers if model is not None else setup.checkpoint.num_layers
    own, passes = setup.speculator.depth, waits(setup, config)
    return target / (own * passes + target) if passes else min(1.0, target / (own * setup.stages))


def waits(setup: Resolved, config: SpeculativeConfig) -> int:
    """Number of the drafter's passes per trip that begin only after the stages' steps: n, m or 0."""
    assert setup.speculator is not None
    if isinstance(config.strategy_options, StaticTreeOptions):
        return config.strategy_options.tree_depth
    after_step = config.drafter_options.needs_entered is not None or setup.speculator.asking > 0
    return setup.stages if after_step else 0
