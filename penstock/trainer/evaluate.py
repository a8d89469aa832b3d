"""Evaluates a drafter in training on held-out data at T = 0, and estimates its gain on a cluster."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn

from penstock.bench.intervals import paired_ratio
from penstock.cluster import Cluster
from penstock.simulator.run import simulate
from penstock.simulator.script import profile_script
from penstock.speculation import SpeculativeConfig
from penstock.trainer.data.batches import Batch
from penstock.trainer.kinds.base import Trainee

CANDIDATES: Final = 16
CHAIN: Final = 7
"""Greatest number of tokens ahead that are evaluated."""
REQUESTS: Final = 4
TOKENS: Final = 100
"""Tokens of each simulated request."""


@dataclass(frozen=True)
class Acceptance:
    """Fractions of the held-out tokens; ``by_step[k][c]``: the draft of step k is among the c + 1 best candidates.

    The earlier tokens of a chain are the text's, whether or not they would have been drafted.
    """

    by_step: tuple[tuple[float, ...], ...]
    drafts: tuple[int, ...]
    """Number of tokens that were evaluated in each step."""

    @property
    def profile(self) -> tuple[float, ...]:
        """Acceptance by number of candidates, with all steps weighted alike: a full pipeline drafts at every depth."""
        columns = zip(*self.by_step, strict=True)
        return tuple(sum(s * n for s, n in zip(c, self.drafts, strict=True)) / sum(self.drafts) for c in columns)


@torch.no_grad()
def evaluate(trainee: Trainee, head: nn.Module, batches: Iterable[Batch]) -> Acceptance:
    """Rank the target's best token among the drafter's candidates. ``head`` is the target's."""
    hits: list[Tensor] = []
    drafts: list[int] = []
    for batch in batches:
        learned_Bn = batch.learned_Bn
        with torch.autocast(learned_Bn.device.type, enabled=False):
            best_Bn = torch.full_like(batch.tokens_Bn, -1)
            best_Bn[learned_Bn] = head(batch.final_BnD[learned_Bn]).argmax(-1)
        for step, hidden in enumerate(trainee.unroll(batch, CHAIN)):
            # A step's output stands for the last rows only: the first ones have no chain of that length.
            first = learned_Bn.shape[1] - hidden.shape[1]
            learned = learned_Bn[:, first:]
            logits_mV = trainee.logits(step, hidden[learned])
            ranked = logits_mV.topk(min(CANDIDATES, logits_mV.shape[1])).indices
            found = (ranked == best_Bn[:, first:][learned][:, None]).sum(0)
            if step == len(hits):
                hits.append(torch.zeros_like(found))
                drafts.append(0)
            hits[step] += found
            drafts[step] += len(logits_mV)
    counted = [(one, of) for one, of in zip(hits, drafts, strict=True) if of]
    shares = tuple(tuple((one.cumsum(0) / of).clamp(max=1).tolist()) for one, of in counted)
    return Acceptance(shares, tuple(of for _, of in counted))


def estimated_speedup(accuracy: Sequence[float], cluster: Cluster) -> float:
    """Speed-up over plain decoding, simulated with drafts of this profile and the default strategy.

    The drafter's time is the one in the cluster's file.
    """
    script = profile_script(accuracy, REQUESTS, TOKENS, seed=0)
    speculation = SpeculativeConfig(method="synthetic", accuracy=tuple(accuracy))
    found, plain = simulate(cluster, script, speculation), simulate(cluster, script, None)
    ratio = paired_ratio([base.seconds / one.seconds for one, base in zip(found, plain, strict=True)])
    assert ratio is not None
    return ratio.mean
