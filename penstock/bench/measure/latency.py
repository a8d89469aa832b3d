"""PipeDec's formulas for the time per token (Yin et al., section 2.4), with an emulated cluster's prices.

    plain          sum of T_c + sum of T_t                      every stage and every hop, one after the other
    speculating    max(T_draft, C x max of T_c + max of T_t)    a step, which gives a token where every draft hits

T_c is the time of a stage for a batch, T_t of a hop between two stages, T_draft of a pass of the drafter. C, which the
paper leaves to the hardware, is the time of a batch with the strategy's widest layer relative to that of one row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.cluster import Cluster, link_timings, stage_timings
from penstock.drafters.options import Weights
from penstock.emulation.cluster import drafter_pass
from penstock.engine.resolve import Resolved

if TYPE_CHECKING:
    from penstock.speculation import SpeculativeConfig


def formula_ms(setup: Resolved, config: SpeculativeConfig | None) -> float | None:
    """Milliseconds per token; None where nothing is emulated, or where whole trees are drafted before they are sent."""
    cluster = setup.cluster
    if cluster is None or not cluster.emulated or (config is not None and config.strategy_options.drafts_whole_trees):
        return None
    rows = max(1, config.strategy_options.most_rows) if config is not None else 1
    stages = [timing.seconds(rows) for timing in stage_timings(cluster)]
    # The first and the last link connect the engine, and are no hops between stages.
    hops = [timing.seconds(rows) for timing in link_timings(cluster)[1:-1]]
    if config is None or not config.strategy_options.drafts:
        return 1e3 * (sum(stages) + sum(hops))
    return 1e3 * max(draft_seconds(setup, cluster, config, rows), max(stages) + max(hops, default=0.0))


def draft_seconds(setup: Resolved, cluster: Cluster, config: SpeculativeConfig, rows: int) -> float:
    """Seconds of a drafter's pass over ``rows`` rows; 0 where its answers are immediate."""
    if config.drafter_options.priced_as is Weights.NONE:
        return 0.0
    timing = drafter_pass(cluster, setup.speculator.depth if setup.speculator is not None else None)
    return timing.seconds(rows) if timing is not None else 0.0
