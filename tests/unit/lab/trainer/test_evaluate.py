"""Acceptance is counted from where the target's token stands among the candidates."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from penstock.checkpoint.checkpoint import Checkpoint
from penstock.cluster import load_cluster
from penstock.lab.trainer.loop import estimated_speedup, evaluate
from penstock.lab.trainer.states import Batch
from tests.training import random_batch

TOKENS = 20


class Ranked:
    """Drafts the target's token in place ``ranks[step]`` of its candidates."""

    steps = 2

    def __init__(self, head: torch.nn.Module, ranks: list[int]) -> None:
        self._head = head
        self._ranks = ranks

    def unroll(self, batch: Batch, steps: int) -> Iterator[torch.Tensor]:
        for step in range(len(self._ranks)):
            yield batch.final_BnD[:, step:]

    def logits(self, step: int, hidden_nD: torch.Tensor) -> torch.Tensor:
        best_n = self._head(hidden_nD).argmax(-1)
        order_nV = (torch.arange(TOKENS)[None] - best_n[:, None] + self._ranks[step]) % TOKENS
        return -order_nV.float()


def test_it_counts_ranks_by_step(target: Checkpoint) -> None:
    head = torch.nn.Linear(target.hidden_size, TOKENS)
    batches = [random_batch(target, 2, 8, 1), random_batch(target, 1, 6, 1)]
    batches[0].learned_BL[0, 4:] = False
    found = evaluate(Ranked(head, [0, 3, 18]), head, batches)  # type: ignore[arg-type]
    assert found.by_step[0] == (1.0,) * 16
    assert found.by_step[1] == (0.0,) * 3 + (1.0,) * 13
    assert found.by_step[2] == (0.0,) * 16
    assert found.drafts == (12, 9, 6)
    assert found.profile[3] == pytest.approx(21 / 27)


def test_a_better_drafter_is_estimated_faster() -> None:
    cluster = load_cluster("demo")
    worse, better = (estimated_speedup(accuracy, cluster) for accuracy in ((0.2, 0.3), (0.9, 0.95)))
    assert 1 < worse < better
