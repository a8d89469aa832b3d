"""The loss is the divergence from what the target says, over the rows and tokens that can teach."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from penstock.checkpoint.checkpoint import Checkpoint
from penstock.lab.trainer.kinds import Teaching
from tests.training import changed, random_batch

VOCABULARY = torch.tensor([1, 4, 5, 8, 9])
TOKENS = 12


def head_of(target: Checkpoint) -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(target.hidden_size, TOKENS, bias=False)


def divergence_of(wanted_V: torch.Tensor, mine_V: torch.Tensor) -> torch.Tensor:
    wanted_V = wanted_V.softmax(-1)
    return (wanted_V * (wanted_V.log() - mine_V.log_softmax(-1))).sum()


@pytest.mark.parametrize("ids", [None, VOCABULARY], ids=["all", "some"])
@pytest.mark.parametrize("step", [0, 2])
def test_the_divergence_is_summed_over_what_teaches(target: Checkpoint, ids: torch.Tensor | None, step: int) -> None:
    head, batch = head_of(target), random_batch(target, 3, 9, 1)
    batch.learned_BL[1, 3:5] = False
    teaching = Teaching(head, batch, ids)
    own = torch.nn.Linear(target.hidden_size, TOKENS if ids is None else len(ids))
    hidden = torch.randn(3, 7 - step, target.hidden_size)
    expected, rows = torch.zeros(()), 0
    for sequence in range(3):
        for row in range(step, 7):
            wanted_V = head(batch.final_BnD[sequence, row])
            if not batch.learned_Bn[sequence, row] or (ids is not None and wanted_V.argmax() not in ids):
                continue
            expected += divergence_of(wanted_V if ids is None else wanted_V[ids], own(hidden[sequence, row - step]))
            rows += 1
    assert 3 < rows < 21
    torch.testing.assert_close(teaching.divergence(hidden, own), expected, atol=1e-4, rtol=1e-4)
    assert ids is not None or int(teaching.taught_Bn.sum()) == 19


def test_it_is_zero_for_the_target_itself_and_for_nothing(target: Checkpoint) -> None:
    head, batch = head_of(target), random_batch(target, 2, 6, 1)
    found = Teaching(head, batch, None).divergence(batch.final_BnD, head)
    assert abs(found.item()) < 1e-4
    nothing = changed(batch, learned_BL=torch.zeros_like(batch.learned_BL))
    found = Teaching(head, nothing, None).divergence(batch.final_BnD.requires_grad_(), head)
    assert found.item() == 0
    found.backward()


def test_its_gradient_is_that_of_the_cross_entropy(target: Checkpoint) -> None:
    head, batch = head_of(target), random_batch(target, 2, 6, 1)
    hidden = torch.randn(2, 4, target.hidden_size, requires_grad=True)
    Teaching(head, batch, None).divergence(hidden, head).backward()
    assert hidden.grad is not None
    found, hidden.grad = hidden.grad.clone(), None
    F.cross_entropy(
        head(hidden).flatten(0, 1), head(batch.final_BnD).softmax(-1).flatten(0, 1), reduction="sum"
    ).backward()
    torch.testing.assert_close(found, hidden.grad)


def test_rows_that_are_not_chosen_count_for_nothing(target: Checkpoint) -> None:
    head, batch = head_of(target), random_batch(target, 2, 6, 1)
    teaching, own = Teaching(head, batch, None), torch.nn.Linear(target.hidden_size, TOKENS)
    hidden = torch.randn(2, 4, target.hidden_size)
    chosen = torch.tensor([[True, False, False, True], [False, True, False, False]])
    parts = [teaching.divergence(hidden, own, among) for among in (chosen, ~chosen)]
    torch.testing.assert_close(sum(parts), teaching.divergence(hidden, own))
    alone = divergence_of(head(batch.final_BnD[1, 1]), own(hidden[1, 1]))
    only = torch.zeros_like(chosen)
    only[1, 1] = True
    torch.testing.assert_close(teaching.divergence(hidden, own, only), alone, atol=1e-4, rtol=1e-4)
